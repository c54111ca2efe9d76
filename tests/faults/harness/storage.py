"""Faults of storage: a model directory that is full, read-only or gone; checkpoints cut short by a kill, or damaged."""

import contextlib
import errno
import hashlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import proc
import timeline
from attempt import Attempt
from kills import Act

_DISK = "size=32m"
_SAYS = r"cannot be (written|saved|made)|could not be saved|No space|Read-only|No such file"
_HELD = re.compile(r"\b(held|holds|in use|used by)\b")
Breaking = Callable[[Attempt], "contextlib.AbstractContextManager[None]"]


# The directory


@contextlib.contextmanager
def full(run: Attempt) -> Iterator[None]:
    """Fill the disk under the model directory."""
    ballast = run.model_dir / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
        while True:
            file.write(bytes(1))
    try:
        _must_fail(run.model_dir / "probe", errno.ENOSPC)
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(run: Attempt) -> Iterator[None]:
    """Make the model directory read-only for whoever opens a file from now on."""
    subprocess.run(["mount", "--bind", run.model_dir, run.model_dir], check=True)  # the logs that are open stay so
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", run.model_dir], check=True)
        _must_fail(run.model_dir / "probe", errno.EROFS)
        yield
    finally:
        subprocess.run(["umount", "--lazy", run.model_dir], check=True)


@contextlib.contextmanager
def vanished(run: Attempt) -> Iterator[None]:
    """Take the model directory away."""
    away = run.model_dir.with_name("away")
    run.model_dir.rename(away)
    yield
    if run.model_dir.exists():  # it was made anew
        for path in run.model_dir.iterdir():
            path.rename(away / path.name)
        run.model_dir.rmdir()
    away.rename(run.model_dir)


def _must_fail(path: Path, number: int) -> None:
    try:
        path.write_bytes(b"x" * 8192)
    except OSError as error:
        if error.errno == number:
            return
    raise proc.NotInjectedError(f"{path} can be written")


@contextlib.contextmanager
def _disk(run: Attempt) -> Iterator[None]:
    """Give the job a small disk of its own."""
    run.model_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", run.model_dir], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", run.model_dir], check=False)


def broken(breaking: Breaking, for_ever: bool = False) -> Act:
    """Return the fault of a model directory that cannot be written any more, until it is mended, or for ever."""

    def act(run: Attempt) -> None:
        with _disk(run) if breaking is not vanished else contextlib.nullcontext():
            run.start()
            run.saved(2)
            before = _digests(run.model_dir)
            with contextlib.ExitStack() as stack:
                with run.fault(says=_SAYS):
                    stack.enter_context(breaking(run))
                run.until(lambda: _is_noticed(run), "a word about the directory")
                run.recover()  # training goes on meanwhile
                if for_ever:
                    run.finish()
            if not for_ever:
                _mended(run)
            _untouched(run, before)
            run.check_saved()

    return act


def _is_noticed(run: Attempt) -> bool:
    """Return whether somebody has said that saving fails; a directory that is away can also be made anew."""
    said = timeline.detected(run.lines, run.mark) is not None
    return said or any(line.text.startswith("saved ") for line in run.lines[run.mark.edge :])


def _mended(run: Attempt) -> None:
    edge = len(run.lines)
    run.healed()
    run.until(lambda: any("saved " in line.text for line in run.lines[edge:]), "a checkpoint after that")
    run.result.settle_secs = time.monotonic() - run.mark.since
    run.finish()


def _digests(directory: Path) -> Mapping[str, str]:
    """Return the digest of every file of the checkpoints that are whole."""
    whole = [path.stem for path in directory.glob("model.ckpt-*.index")]
    files = [path for stem in whole for path in directory.glob(f"{stem}.*")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _untouched(run: Attempt, before: Mapping[str, str]) -> None:
    """Make sure that the checkpoints which were whole before are so now, but for those that newer ones replaced."""
    now = _digests(run.model_dir)
    changed = [name for name, digest in before.items() if name in now and now[name] != digest]
    run.need(not changed, f"changed: {', '.join(changed)}")
    run.need(bool(now), "no whole checkpoint is left")


def removed(run: Attempt) -> None:
    """The model directory is removed, with all that is in it; soon after, a PS is lost.

    Where nothing was saved anew before, the job has to begin at step 0, and to say so.
    """
    run.start()
    run.saved(2)
    [ps] = run.pids("ps/1")
    began = len(run.lines)
    subprocess.run(["rm", "-rf", run.model_dir], check=False)  # what a save removes meanwhile is no error
    time.sleep(3 * run.random.random())
    with run.fault("ps/1"):
        proc.kill([ps])
    run.until(lambda: run.resumed_step() is not None, "a word about the step that it goes on from")
    run.until(lambda: _is_beyond(run), f"a step beyond {max(run.mark.last.values())}")
    run.measure(time.monotonic())
    run.note("nothing had been saved anew" if run.resumed_step() == 0 else "")
    gone = [line for line in run.lines[began:] if "--model_dir" in line.text and "gone" in line.text]
    run.need(bool(gone), "nobody says that the directory is gone")
    run.finish()


def _is_beyond(run: Attempt) -> bool:
    return timeline.recovered(run.lines, run.mark, ()) is not None


def second_job(run: Attempt) -> None:
    """Another job is started in the model directory: refused at its start, with the holder's name."""
    run.start()
    run.saved()
    said: list[timeline.Line] = []
    with run.fault():
        other = run.another(said)
    run.until(lambda: other.code is not None, "the end of the second job")
    other.close()
    reported = " ".join(line.text for line in said)
    run.need(other.code in (2, 74), f"the second job has ended with {other.code}")
    run.need("--model_dir" in reported and _HELD.search(reported) is not None, f"it says: {reported[:200]}")
    run.need(not timeline.steps(said), "it has taken steps")
    run.note(f"the second one's exit code {other.code}")
    run.recover("worker/0", "worker/1")
    run.finish()


# The checkpoints


Damage = Callable[[Attempt, Path], None]


def truncated(run: Attempt, newest: Path) -> None:
    """Cut the newest checkpoint's values short."""
    for data in _data_of(newest):
        os.truncate(data, data.stat().st_size // 2)
    del run


def flipped(run: Attempt, newest: Path) -> None:
    """Change one bit of the newest checkpoint's values."""
    data = next(path for path in _data_of(newest) if path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[run.random.randrange(len(content))] ^= 1 << run.random.randrange(8)
    data.write_bytes(content)


def without_shard(run: Attempt, newest: Path) -> None:
    """Take away one file of the newest checkpoint's values."""
    run.random.choice(_data_of(newest)).unlink()


def without_index(run: Attempt, newest: Path) -> None:
    """Empty the newest checkpoint's index."""
    newest.write_bytes(b"")
    del run


def garbled_state(run: Attempt, newest: Path) -> None:
    """Write nonsense into the state file."""
    (newest.parent / "checkpoint").write_bytes(run.random.randbytes(200))


def empty_state(run: Attempt, newest: Path) -> None:
    """Empty the state file."""
    (newest.parent / "checkpoint").write_bytes(b"")
    del run


def all_truncated(run: Attempt, newest: Path) -> None:
    """Cut every checkpoint short."""
    for index in newest.parent.glob("model.ckpt-*.index"):
        truncated(run, index)
        run.spoiled.add(index.stem)


def other_shapes(run: Attempt, newest: Path) -> None:
    """Change the model, so that no checkpoint fits it."""
    run.tell("wide")
    del newest


def _data_of(index: Path) -> list[Path]:
    return sorted(index.parent.glob(f"{index.stem}.data-*"))


def damaged(damage: Damage) -> Act:
    """Return the fault of a job that was killed, all of it, and started again, with a checkpoint damaged meanwhile."""

    def act(run: Attempt) -> None:
        older = _started_again(run, damage)
        run.recover()
        run.need(run.first_after() >= older, f"it began at step {run.first_after()}")
        run.finish()

    return act


def unusable(damage: Damage) -> Act:
    """Return the fault of a job that was killed and started again, with no checkpoint left that it can use."""

    def act(run: Attempt) -> None:
        _started_again(run, damage)
        run.ends()
        run.need(not run.first_after(), "it took steps nevertheless")

    return act


def _started_again(run: Attempt, damage: Damage) -> int:
    """Kill a job, damage its checkpoints, start it again; returns the step of the checkpoint before the newest."""
    run.start()
    run.saved(3)
    run.kill_all()
    older, newest = sorted(run.model_dir.glob("model.ckpt-*.index"), key=_step)[-2:]
    with run.fault(says=r"damaged|truncated|falling back|older|cannot be (read|used)|does not fit"):
        damage(run, newest)
    run.spoiled.add(newest.stem)
    run.healed()  # what is measured is the start
    run.start()
    return _step(older)


def _step(index: Path) -> int:
    return int(index.stem.rpartition("-")[2])
