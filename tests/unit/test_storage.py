"""Files are written completely or not at all."""

import builtins
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import unreadable

from tfps.errors import CheckpointError, StorageError
from tfps.storage import JobDirectory, UnreadableError, make_dir, open_to_append, read_json, write_json


def test_json_is_written_whole_and_readable(tmp_path: Path) -> None:
    """A file is written with its directories, and read back; NaN and Inf at any depth are null."""
    path = tmp_path / "a" / "b" / "summary.json"
    write_json(path, {"loss": math.nan, "eval": {"x": [math.inf, 1.5, (2,)]}, "name": "é", "none": None, "ok": True})
    assert path.read_text().endswith("}\n")
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == read_json(path)
    assert read_json(path) == {"loss": None, "eval": {"x": [None, 1.5, [2]]}, "name": "é", "none": None, "ok": True}
    write_json(path, {"new": 1})
    assert read_json(path) == {"new": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    """A user who lets nobody read, or a group write, gets files like that."""
    before = os.umask(umask)
    try:
        write_json(tmp_path / "job.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("failing", ["open", "replace"])
def test_json_that_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """If the disk is full at any point, the old file is whole, no temporary one is left, and the flag is named."""
    path = tmp_path / "job.json"
    write_json(path, {"old": 1})

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*{"open": (builtins, "open"), "replace": (Path, "replace")}[failing], fail)
        with pytest.raises(StorageError) as caught:
            write_json(path, {"new": 2})
    assert str(caught.value) == f"--model_dir: {path} cannot be written: No space left on device."
    assert caught.value.exit_code == 74
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_of_what_json_does_not_know_leaves_the_old_file(tmp_path: Path) -> None:
    """A value that has no JSON is a bug, and writes nothing."""
    path = tmp_path / "job.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    """A file in the way of ``--model_dir`` is exit 74, with its path and the system's words."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"--model_dir: .*/file/m cannot be made \(Not a directory\): give a dir"):
        write_json(tmp_path / "file" / "m" / "job.json", {})
    with pytest.raises(StorageError, match=r"--model_dir: .*/file cannot be made \(File exists\): give a dir"):
        write_json(tmp_path / "file" / "job.json", {})


def test_a_directory_that_is_a_link_to_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    """Its name exists, so the words of the system would not help."""
    (tmp_path / "m").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match=r"m cannot be made \(a link to what is not there\): give a directory"):
        make_dir(tmp_path / "m")


def test_no_file_is_no_json(tmp_path: Path) -> None:
    """A file that is not there is ``None``, not an error."""
    assert read_json(tmp_path / "job.json") is None


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"{} {}", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    """A damaged or foreign file is exit 65, naming it and the fix; not silently nothing."""
    path = tmp_path / "job.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("Move it away, or give another --model_dir.")


def test_json_that_cannot_be_read_for_a_moment_is_read_again(tmp_path: Path) -> None:
    """Reading ends well as soon as it can; after some tries, an error of its own says that nothing is known."""
    path = tmp_path / "job.json"
    write_json(path, {"run": "a"})
    with unreadable(path, times=3) as tried:
        assert read_json(path) == {"run": "a"}
    assert len(tried) == 4
    with unreadable(path) as tried, pytest.raises(UnreadableError, match=r"job\.json cannot be read: Input/output"):
        read_json(path)
    assert len(tried) == 5
    path.write_text("{")
    with pytest.raises(CheckpointError) as damaged:
        read_json(path)
    assert not isinstance(damaged.value, UnreadableError)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("kind", ["FIFO", "directory"])
def test_not_every_file_is_opened_to_append(tmp_path: Path, kind: str, is_read: bool) -> None:
    """In place of a log, a FIFO or a directory is refused at once: writing to a FIFO that nobody reads would block."""
    path = tmp_path / "logs" / "launch.log"
    path.parent.mkdir()
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with pytest.raises(StorageError) as caught:
        open_to_append(path)
    assert str(caught.value) == f"--model_dir: {path} cannot be written: it is not a regular file."
    if reader is not None:
        os.close(reader)


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    """It is made with its directory, keeps what it has, and is written like any other."""
    for text in (b"one\n", b"two\n"):
        with open_to_append(tmp_path / "logs" / "launch.log") as file:
            assert os.get_blocking(file.fileno())
            file.write(text)
    assert (tmp_path / "logs" / "launch.log").read_text() == "one\ntwo\n"


def test_the_files_of_a_job_have_their_names() -> None:
    """Jobs of earlier versions have these names, so that their directories go on, and people know them."""
    directory = JobDirectory("m")
    named = [directory.job, directory.summary, directory.log("worker/0"), directory.launcher_log, directory.state_file]
    assert [str(path) for path in named] == [
        "m/job.json",
        "m/summary.json",
        "m/logs/worker-0.log",
        "m/logs/launch.log",
        "m/checkpoint",
    ]
    assert directory.checkpoint(50) == "m/model.ckpt-50"
    assert (directory.training_events, directory.evaluation_events) == (Path("m"), Path("m/eval"))
    assert (directory.export(50), directory.staging("id")) == (Path("m/export/50"), Path("m/.saving-id"))
    assert (directory.owner, directory.owner_lock) == (Path("m/.chief"), Path("m/.chief.lock"))
