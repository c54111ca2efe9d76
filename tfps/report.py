"""A job's output for users and programs: progress lines, ``job.json`` and ``summary.json``.

A progress line is ``name=value`` pairs, one line per report, the same on every platform. ``parse_progress`` reads it
back, so that a launcher can follow a task through its output alone. Must not import TensorFlow.
"""

import errno
import io
import json
import math
import os
import re
import stat
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfps.errors import CheckpointError, StorageError, without_colors

JOB, SUMMARY, LOGS = "job.json", "summary.json", "logs"
SCHEMA_VERSION = 1  # of job.json and summary.json: within a version, names that exist stay and keep their meaning
_SHORT_SECS = 10.0  # in a shorter job, chance decides which worker is the slowest
_SLOW, _BEHIND = 0.8, 0.2  # the thresholds from which a worker is reported as slow
# In an error, the calls that created an operation, before the reason: once, or for each of several operations.
_MADE_AT = re.compile(r"^Detected at node .*\n?(?:[ \t].*\n?)*|^Node: '.*'$", re.MULTILINE)

# The first word of a task's line, if the line starts a new state of that task.
STATES = ("waiting", "training", "evaluating", "done", "stopped", "stalled", "restarted", "error")


def format_progress(step: int, values: Mapping[str, float]) -> str:
    """Return a progress line like ``step=100 loss=0.53 examples/s=12345``."""
    named = ((re.sub(r"[\s=]", "_", name), value) for name, value in values.items())
    return " ".join([f"step={step}", *(f"{name}={_number(value)}" for name, value in named)])


def parse_progress(line: str) -> dict[str, float] | None:
    """Return the pairs of a progress line, or ``None`` for any other line."""
    if not re.match(r"step=[0-9]{1,19}(\s|\Z)", line):
        return None
    first, *others = (word.partition("=") for word in line.split())
    try:
        return {**{name: float(value) for name, _, value in others}, "step": float(first[2])}
    except ValueError:
        return None


def state_of(line: str) -> str:
    """Return the state that a task's line starts, one of ``STATES``; empty if it starts none."""
    word = line.partition(" ")[0].rstrip().rstrip(":")
    return word if word in STATES else ""


def is_reserved(line: str) -> bool:
    """Return whether a line begins like one of a task's own: with a state, or as a progress line."""
    return bool(state_of(line) or re.match(r"step=[0-9]", line))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 9999.5 and math.isfinite(value) else f"{value:.4g}"


def count(number: float) -> str:
    """Return a count in readable form: ``12,345``."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def duration(secs: float) -> str:
    """Return a duration in readable form: ``0.8 s``, ``42 s``, ``3 min 05 s``, ``2 h 04 min``."""
    if secs < 10:
        return f"{secs:.1f} s"
    if secs < 120:
        return f"{secs:.0f} s"
    minutes, rest = divmod(round(secs), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def utc(secs: float) -> str:
    """Return a time, in seconds since 1970, as ``2026-11-23T17:04:36Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(secs))


def make_dir(path: Path) -> None:
    """Create a directory of the job.

    Raises:
        StorageError: If it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be made: {error.strerror}.") from None


def temporary_directory() -> str:
    """Return the directory for temporary files.

    Raises:
        StorageError: If there is none.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise StorageError("no temporary file can be written: set TMPDIR to a directory where one can.") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file like ``write_text``. NaN and Inf become null.

    Raises:
        StorageError: If it cannot be written.
    """
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, through a temporary file that is renamed.

    Raises:
        StorageError: If it cannot be written.
    """
    make_dir(path.parent)
    try:
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "x") as file:  # with the permissions that the umask leaves
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be written: {error.strerror}.") from None


def remove(path: Path) -> None:
    """Delete a file of the job, if it exists.

    Raises:
        StorageError: If it cannot be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be deleted: {error.strerror}.") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; reading any other, such as a FIFO, might block without end.

    Raises:
        OSError: If the file is not regular, or cannot be read.
    """
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> io.FileIO:
    """Open a regular file for reading.

    Raises:
        OSError: If the file is not regular, or cannot be opened.
    """
    try:  # open first, because NFS looks for new files then
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENXIO):  # a directory, a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or ``None`` if there is no such file.

    Raises:
        CheckpointError: If it is not a JSON object: another program wrote it, or it is damaged.
    """
    try:
        value = json.loads(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read: {why}. Move it away, or give another --model_dir.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object. Move it away, or give another --model_dir.")
    return value


def pace(steps_per_run: int, runs_in_flight: int, num_workers: int) -> str:
    """Return a description of how steps run, and how much staler each worker's extra runs make gradients."""
    steps = f"{steps_per_run} steps a run" if steps_per_run > 1 else "1 step a run"
    late = f", {runs_in_flight} under way: gradients are about {(runs_in_flight - 1) * num_workers} staler"
    return steps + (late if runs_in_flight > 1 else "")


def final_lines(summary: Mapping[str, Any], model_dir: str | None) -> list[str]:
    """Return the final report of a job for its user, made from the summary."""
    step, secs, rate = (summary.get(name) or 0 for name in ("global_step", "seconds", "examples_per_sec"))
    resumed = summary.get("resumed_from_step")
    lines = [f"done: step {count(step)} after {duration(secs)}"]
    lines[0] += f", {count(rate)} examples/s" if rate else ""
    lines[0] += f", resumed from step {count(resumed)}" if resumed else ""
    if (first := summary.get("first_step_secs")) is not None:
        lines.append(f"  first step     after {duration(first)}")
    if summary.get("loss") is not None:
        lines.append(f"  training loss  {summary['loss']:.4g}")
    if summary.get("pace"):
        workers = sum(task.startswith("worker/") for task in summary.get("tasks", {}))
        lines.append(f"  pace           {pace(**summary['pace'], num_workers=workers)}")
    metrics = summary.get("eval") or {}
    lines += [f"  eval {name:<9} {told}" for name, value in metrics.items() if (told := _metric(value))]
    lines += [f"  {name:<14} {told}" for name, told in _course(summary).items() if told]
    if model_dir:
        lines += [f"  checkpoint     {summary.get('checkpoint') or 'none'}", f"  logs           {model_dir}/logs"]
    return lines


def _course(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the notable facts about a job's course for its user."""
    restarted = {task: of for task, of in summary.get("tasks", {}).items() if of.get("restarts")}
    restarts = [f"{task} {of['restarts']}{_after(of.get('restarted_after'))}" for task, of in restarted.items()]
    lost = summary.get("recovery_secs")
    names = ("gradients_dropped", "batches_skipped", "partial_updates")
    dropped, skipped, partial = (summary.get(name) for name in names)
    return {
        "staleness": _shares(summary.get("staleness") or []),
        "slowest": slowest(summary),
        "restarts": ", ".join(restarts) + (f"; {duration(lost)} lost to recovery" if restarts and lost else ""),
        "dropped": f"{count(dropped)} gradients that came too late" if dropped else "",
        "skipped": f"{count(skipped)} {'batch' if skipped == 1 else 'batches'}" if skipped else "",
        "partial": f"{plural(partial, 'update')} of a lost worker, which some variables have and others not"
        if partial
        else "",
    }


def _after(reasons: Sequence[str] | None) -> str:
    return f" (after {', '.join(dict.fromkeys(reasons))})" if reasons else ""


def _shares(counts: Sequence[int], most: int = 5) -> str:
    """Return a histogram of the staleness of gradients as shares; empty if none was stale."""
    total = sum(counts)
    if total == (counts[0] if counts else 0):
        return ""
    shown = {str(stale): number for stale, number in enumerate(counts[:most])}
    shown |= {f"{most} or more": sum(counts[most:])} if len(counts) > most else {}
    return ", ".join(f"{stale}: {number / total:.0%}" for stale, number in shown.items() if number) + " of the steps"


def slowest(summary: Mapping[str, Any]) -> str:
    """Return which worker is clearly slower than the others, and how that shows; empty if none is."""
    paces, behind = summary.get("steps_per_sec") or {}, summary.get("behind") or {}
    is_blocking = summary.get("is_blocking")
    if len(paces) > 1 and not is_blocking and summary.get("seconds", math.inf) > _SHORT_SECS:
        last = min(paces, key=paces.__getitem__)
        usual = statistics.median(pace for task, pace in paces.items() if task != last)
        if paces[last] < _SLOW * usual:
            return f"{last}: {paces[last] / usual:.0%} of the others' steps a second"
    most, *others = sorted(behind, key=behind.__getitem__, reverse=True) or [""]
    if not most or behind[most] < _BEHIND + max((behind[other] for other in others), default=0.0):
        return ""
    what = "the others waited for it" if is_blocking else "at less than half the others' pace"
    return f"{most}: {what} {behind[most]:.0%} of the time"


def _metric(value: Any, most: int = 8) -> str:
    """Return a metric's value in readable form: a number, or the first ones of an array; else empty."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "not finite"
    if isinstance(value, list):
        values = list(_flat(value))
        return " ".join(map(_metric, values[:most])) + (
            f" ... ({count(len(values))} in all)" if len(values) > most else ""
        )
    return _number(value) if isinstance(value, (int, float)) else ""


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]


def brief(error: BaseException) -> str:
    """Return the gist of an error on one line, without TensorFlow's additions."""
    text = _MADE_AT.sub("", without_colors(str(getattr(error, "message", error))))
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line.strip("=") and line != "Graph execution error:"]
    return " ".join(telling[:2]) or type(error).__name__


def one_line(text: str) -> str:
    """Return a text as one line, for places with room for only one."""
    return re.sub(r"\s+", " ", text).strip()
