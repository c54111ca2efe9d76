"""Whose run a ``job.json`` is of."""

from pathlib import Path

import pytest
from support.checkpoints import unreadable

from tfps.runtime.checkpoint.job_record import is_of_other_launch, is_of_other_run
from tfps.storage import JobDirectory, UnreadableError, place_of


@pytest.mark.parametrize(
    ("record", "file", "of_launch", "of_run"),
    [
        ('{"launch": "mine", "run": "mine"}', "", False, False),
        ('{"launch": "other", "run": "mine"}', "", True, False),
        ('{"launch": "mine", "run": "other"}', "", False, True),
        ('{"launch": null, "run": null}', "", True, False),
        ('{"launch": "mine"}', "model.ckpt-1.index", False, False),
        ("", "", False, False),
        ("", "model.ckpt-1.index", True, False),
        ("{", "model.ckpt-1.index", True, False),
        ("[]", "", False, False),
    ],
)
def test_a_record_is_of_another_run_only_if_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, file: str, of_launch: bool, of_run: bool
) -> None:
    """Of a launch, checkpoints without a record are another's, too, because that launch has written its record."""
    for name, text in (("job.json", record), (file, "an index")):
        if name and text:
            (tmp_path / name).write_text(text)
    monkeypatch.setenv("TFPS_LAUNCH", "mine")
    assert not is_of_other_launch(str(tmp_path)), "no process of this task has recorded its launch"
    monkeypatch.setenv("TFPS_HAS_RECORD", "1")
    assert is_of_other_launch(str(tmp_path)) is of_launch
    assert is_of_other_run(str(tmp_path), "mine") is of_run
    assert not is_of_other_run(str(tmp_path), ""), "the run is not known"
    assert JobDirectory(tmp_path).has_run() is bool(record or file)


def test_a_record_that_cannot_be_read_now_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is another run's is not known, nor that it is not."""
    monkeypatch.setenv("TFPS_HAS_RECORD", "1")
    (tmp_path / "job.json").write_text("{}")
    with unreadable(tmp_path / "job.json"):
        with pytest.raises(UnreadableError):
            is_of_other_launch(str(tmp_path))
        with pytest.raises(UnreadableError):
            is_of_other_run(str(tmp_path), "mine")


def test_a_lost_record_is_of_another_run_only_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher knows in which directory the record was written; another one may have taken its place."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for directory in (mine, other):
        directory.mkdir()
        (directory / "model.ckpt-1.index").write_text("an index")
    monkeypatch.setenv("TFPS_HAS_RECORD", str(place_of(str(mine))))
    assert [is_of_other_launch(str(directory)) for directory in (mine, other)] == [False, True]
    mine.rename(tmp_path / "kept")
    other.rename(mine)
    assert is_of_other_launch(str(mine))
    (mine / "job.json").write_text("{")
    assert is_of_other_launch(str(mine))
    assert place_of(str(tmp_path / "none")) == (0, 0)
