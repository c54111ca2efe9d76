"""Progress lines, JSON files and the final report."""

import builtins
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tfps import report
from tfps.errors import CheckpointError, StorageError
from tfps.report import format_progress, parse_progress, read_json, utc, write_json

NEARLY = ["", "step", "step=", "step=x", "step=nan", "step=inf", "step=-1", "step=1.5", "step=1e3", "step=٣", "step=5,"]


@pytest.mark.parametrize(
    ("steps", "runs", "told"),
    [
        (1, 1, "1 step a run"),
        (8, 1, "8 steps a run"),
        (8, 2, "8 steps a run, 2 under way: gradients are about 2 staler"),
    ],
)
def test_the_report_tells_the_pace(steps: int, runs: int, told: str) -> None:
    """How many steps a run took, how many runs were under way, and what that did to the gradients."""
    tasks: dict[str, object] = {name: {} for name in ("ps/0", "worker/0", "worker/1")}
    summary = {"pace": {"steps_per_run": steps, "runs_in_flight": runs}, "tasks": tasks}
    assert report.final_lines(summary, None)[1:] == [f"  pace           {told}"]


def test_a_progress_line_as_people_see_it() -> None:
    """A progress line has the step, then each value as short as it can be read."""
    values = {"loss": 0.53219, "accuracy": 1.0, "examples/s": 12345.6, "tiny": 1.5e-7, "nan": math.nan}
    assert format_progress(100, values) == "step=100 loss=0.5322 accuracy=1 examples/s=12346 tiny=1.5e-07 nan=nan"
    assert format_progress(0, {}) == "step=0"
    assert format_progress(7, {"a": 9999.4, "b": 9999.6, "c": -123456.7}) == "step=7 a=9999 b=10000 c=-123457"


@pytest.mark.parametrize("value", [0.0, -1.5, 0.25, 9999.0, 12345.0, 1e-30, 1e30, math.inf, -math.inf])
def test_a_progress_line_is_read_back(value: float) -> None:
    """What one task writes, the launcher reads."""
    line = format_progress(2**53, {"loss": value, "examples/s": 3.0})
    assert parse_progress(line) == {"step": 2.0**53, "loss": value, "examples/s": 3.0}


def test_not_a_number_is_read_back_too() -> None:
    """A loss that is NaN is a value like others."""
    known = parse_progress(format_progress(3, {"loss": math.nan}))
    assert known is not None
    assert math.isnan(known["loss"])


@pytest.mark.parametrize("name", ["my loss", "a=b", "tab\tand\nline", "step"])
def test_a_users_own_names_do_not_break_the_line(name: str) -> None:
    """A scalar that a model logs, whatever its name, leaves the line readable and its step untouched."""
    line = format_progress(5, {"loss": 1.0, name: 9.0})
    assert "\n" not in line
    known = parse_progress(line)
    assert known is not None
    assert (known["step"], known["loss"]) == (5, 1.0)
    assert 9.0 in known.values() or name == "step"


@pytest.mark.parametrize("line", [*NEARLY, "step=5 loss=low", " step=5", "loss=3 step=5", "step=" + "9" * 400])
def test_other_lines_are_not_taken_for_progress(line: str) -> None:
    """A user's own print, however like a progress line, is left alone."""
    assert parse_progress(line) is None


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
    with pytest.raises(StorageError, match=r"--model_dir: .*/file/m cannot be made: Not a directory\."):
        write_json(tmp_path / "file" / "m" / "job.json", {})
    with pytest.raises(StorageError, match=r"--model_dir: .*/file cannot be made: File exists\."):
        write_json(tmp_path / "file" / "job.json", {})


def test_no_file_is_no_json(tmp_path: Path) -> None:
    """A file that is not there is ``None``, not an error."""
    assert read_json(tmp_path / "job.json") is None


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"{} {}"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    """A damaged or foreign file is exit 65, naming it and the fix; not silently nothing."""
    path = tmp_path / "job.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("Move it away, or give another --model_dir.")


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (9.94, "9.9 s"),
        (42.4, "42 s"),
        (119, "119 s"),
        (185, "3 min 05 s"),
        (3599.9, "60 min 00 s"),
        (7440, "2 h 04 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_duration_for_people(secs: float, text: str) -> None:
    """Times are shown in the unit that people would use."""
    assert report.duration(secs) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999.6, "1,000"), (1234567, "1,234,567"), (0.4, "0")])
def test_a_count_for_people(number: float, text: str) -> None:
    """Counts have thousands' separators and no fraction."""
    assert report.count(number) == text


def test_the_final_report() -> None:
    """A job's last words: steps, time, speed, loss, metrics, and where its files are."""
    summary = {"global_step": 1000, "seconds": 61.2, "examples_per_sec": 12345.6, "loss": 0.04567}
    summary |= {"eval": {"accuracy": 0.9153, "loss": 0.25, "note": "text"}, "checkpoint": "m/model.ckpt-1000"}
    summary |= {"tasks": {"ps/0": {"restarts": 0}, "worker/1": {"restarts": 2}}, "batches_skipped": 1234}
    summary |= {"first_step_secs": 4.26}
    assert report.final_lines(summary, "m") == [
        "done: step 1,000 after 61 s, 12,346 examples/s",
        "  first step     after 4.3 s",
        "  training loss  0.04567",
        "  eval accuracy  0.9153",
        "  eval loss      0.25",
        "  restarts       worker/1 2",
        "  skipped        1,234 batches",
        "  checkpoint     m/model.ckpt-1000",
        "  logs           m/logs",
    ]


def test_metrics_that_are_no_plain_numbers_are_in_the_final_report() -> None:
    """A loss that is NaN, which JSON has not, and a metric for each class are told, too."""
    metrics = {"loss": None, "auc": math.nan, "recall": [0.5, None, 1.0], "matrix": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}
    assert report.final_lines({"eval": metrics, "batches_skipped": 1}, None)[1:] == [
        "  eval loss      not finite",
        "  eval auc       not finite",
        "  eval recall    0.5 not finite 1",
        "  eval matrix    1 2 3 4 5 6 7 8 ... (9 in all)",
        "  skipped        1 batch",
    ]


def test_the_final_report_of_little() -> None:
    """A summary without much in it, or with nulls, makes a report too; a resumed job says from where."""
    assert report.final_lines({}, None) == ["done: step 0 after 0.0 s"]
    nulls = {
        "global_step": 5,
        "seconds": None,
        "examples_per_sec": None,
        "loss": None,
        "eval": None,
        "checkpoint": None,
    }
    assert report.final_lines({**nulls, "resumed_from_step": 3}, "m") == [
        "done: step 5 after 0.0 s, resumed from step 3",
        "  checkpoint     none",
        "  logs           m/logs",
    ]


MADE_AT = """Detected at node 'save/SaveV2' defined at (most recent call last):
    File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
    File "/tfps/runtime/graph/passes/snapshot.py", line 173, in save_op
"""


@pytest.mark.parametrize(
    ("message", "gist"),
    [
        ("a plain one", "a plain one"),
        ("", "ValueError"),
        ("Graph execution error:\n\n  first\n===\nsecond\nthird", "first second"),
        (f"Graph execution error:\n\n{MADE_AT}Node: 'save/SaveV2'\n/m/x; File too large", "/m/x; File too large"),
        (f"Graph execution error:\n\n{MADE_AT}/m/x; File too large", "/m/x; File too large"),
        (f"{MADE_AT}Node: 'save/SaveV2'\n{MADE_AT}Node: 'save/SaveV2'\n/m/x; File too large", "/m/x; File too large"),
        (f"{MADE_AT}\n{MADE_AT}=====\nOUT_OF_RANGE: /m/x; File too large\n", "OUT_OF_RANGE: /m/x; File too large"),
    ],
)
def test_the_gist_of_an_error(message: str, gist: str) -> None:
    """Of a long error the telling lines are kept, at most two, on one line; of an empty one its kind."""
    assert report.brief(ValueError(message)) == gist


def test_one_line_of_many() -> None:
    """A text of many lines becomes one."""
    assert report.one_line("  a\n\tb   c\n") == "a b c"


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 9.2, "worker/2": 9.6}}, ""),
        (
            {"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5, "worker/2": 10.0}},
            "worker/1: 25% of the others' steps a second",
        ),
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5}, "seconds": 2.0}, ""),
        ({"is_blocking": False, "steps_per_sec": {"worker/0": 10.0}}, ""),
        ({"is_blocking": True, "steps_per_sec": {"worker/0": 10.0, "worker/1": 2.5}, "behind": {}}, ""),
        ({"is_blocking": True, "behind": {"worker/0": 0.3, "worker/1": 0.4}}, ""),
        ({"is_blocking": True, "behind": {"worker/1": 0.1}}, ""),
        (
            {"is_blocking": True, "behind": {"worker/0": 0.33, "worker/1": 0.6}},
            "worker/1: the others waited for it 60% of the time",
        ),
        (
            {"is_blocking": False, "steps_per_sec": {"worker/0": 1.0, "worker/1": 1.0}, "behind": {"worker/1": 0.4}},
            "worker/1: at less than half the others' pace 40% of the time",
        ),
        (
            {"is_blocking": True, "behind": {"worker/0": 0.05, "worker/1": 0.75}},
            "worker/1: the others waited for it 75% of the time",
        ),
        ({}, ""),
    ],
)
def test_a_worker_that_is_clearly_slower_is_named(summary: dict[str, Any], told: str) -> None:
    """In async its pace tells, in sync how often the others waited for it alone."""
    assert report.slowest(summary) == told


def test_the_course_of_a_job_is_told() -> None:
    """The report tells what was stale, lost, started again and dropped."""
    summary = {
        "staleness": [50, 40, 5, 3, 1, 1],
        "tasks": {
            "ps/0": {"restarts": 0},
            "worker/1": {"restarts": 2, "restarted_after": ["SIGKILL", "exit code 170"]},
        },
        "recovery_secs": 4.25,
        "gradients_dropped": 1234,
    }
    assert report.final_lines(summary, None)[1:] == [
        "  staleness      0: 50%, 1: 40%, 2: 5%, 3: 3%, 4: 1%, 5 or more: 1% of the steps",
        "  restarts       worker/1 2 (after SIGKILL, exit code 170); 4.2 s lost to recovery",
        "  dropped        1,234 gradients that came too late",
    ]
    assert report.final_lines({"staleness": [7]}, None)[1:] == []


def test_times_are_utc() -> None:
    """They are as ISO 8601 has them, to the second, wherever the machine is."""
    assert utc(0.0) == "1970-01-01T00:00:00Z"
    assert utc(1795474890.9) == "2026-11-23T23:01:30Z"
