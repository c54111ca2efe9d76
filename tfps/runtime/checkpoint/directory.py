"""What ``--model_dir`` holds, and how a checkpoint comes into it: whole, or not at all. Does not import TensorFlow.

A checkpoint is there when its index is. It is brought in so:

1. All is written in a directory of its own below ``--model_dir``, and flushed: the data, the index, the manifest, and
   the next ``checkpoint`` state file.
2. The data files are renamed to where they belong; then the manifest.
3. The index is renamed: now there is a checkpoint.
4. The state file is renamed, which TensorFlow's own tools read. What is too old is deleted, each index first.

The state file is written last in 1. and renamed last: while it is in that directory, all of the checkpoint is on the
disk, here or there. So the next chief brings in the rest if one was killed meanwhile; even where a checkpoint of the
same step had to go first, one is whole at any time. A chief that was killed earlier has left nothing of use.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tfps.config.job_config import STARTED_AGAIN, JobConfig, show
from tfps.errors import CheckpointError, StorageError
from tfps.report import SUMMARY, make_dir, read_file, read_json, write_text
from tfps.runtime.checkpoint import file_clock
from tfps.runtime.checkpoint.manifest import INDEX, MANIFEST, file_of, listed, problem, seal, write_flushed

BASE = "model.ckpt"
_STATE, _WRITTEN, _STAGING = "checkpoint", "checkpoint.written", ".saving-"
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # as of shared folders of virtual machines, and FUSE
_NAME = re.compile(r"model\.ckpt-(\d+)\.(index|manifest\.json|data-\d{5}-of-\d{5})")

_BEGAN = time.monotonic()  # this process

log = logging.getLogger(__name__)


def list_checkpoints(model_dir: str | None) -> list[str]:
    """Return the paths of a directory's checkpoints, by their steps, the newest last; some may be damaged.

    The files count, not the ``checkpoint`` state file: a damaged one must not send a job back to step 0. Nor must a
    lost index: what is left of its checkpoint counts, too.

    Raises:
        StorageError: If there is a directory that cannot be read.
    """
    if not model_dir:
        return []
    found = [(int(match[1]), match[2]) for name in _names(model_dir) if (match := _NAME.fullmatch(name))]
    unfinished = {step for staged in _stagings(model_dir) for step in _unfinished(staged)}
    steps = {step for step, suffix in found if suffix == INDEX or step not in unfinished}
    return [path_of(model_dir, step) for step in sorted(steps)]


def _names(directory: str | Path) -> Sequence[str]:
    """Return what a directory holds; nothing if it is not there, or not any more."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"--model_dir: {directory} cannot be read: {error.strerror}.") from None


def _stagings(model_dir: str) -> Sequence[Path]:
    """Return the directories in which a checkpoint is being saved, or was when the chief was killed; no links."""
    found = [Path(model_dir) / name for name in _names(model_dir) if name.startswith(_STAGING)]
    return [path for path in found if not path.is_symlink()]


def _unfinished(staged: Path) -> Sequence[int]:
    """Return the step that is saved in such a directory while its index has yet to be renamed."""
    return [int(found[1]) for name in _names(staged) if (found := _NAME.fullmatch(name)) and found[2] == INDEX]


def path_of(model_dir: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return str(Path(model_dir) / f"{BASE}-{step}")


def step_in(path: str) -> int:
    """Return the step that is a checkpoint's name."""
    return int(path.rpartition("-")[2])


def ended(config: JobConfig) -> bool:
    """Return whether the job has come to its end, and not long ago, as its summary says.

    A task that was lost near the end of its job and is started again finds nobody. One that is started for the first
    time, after that end, is of another run, which goes on if there is something left to train.
    """
    path = Path(config.model_dir or ".") / SUMMARY
    summary = read_json(path) if config.model_dir else None
    if not summary or summary.get("status") != "done" or summary.get("max_steps") != config.max_steps:
        return False
    age_secs = abs(file_clock.now(path.parent) - path.stat().st_mtime)
    is_later = age_secs > time.monotonic() - _BEGAN and not os.environ.get(STARTED_AGAIN)
    if is_later and int(summary.get("global_step") or 0) < config.max_steps:
        return False
    is_there = os.path.isfile(file_of(str(summary.get("checkpoint")), INDEX))  # else it is to begin again
    return is_there and age_secs < config.patience_secs


def select_checkpoint(config: JobConfig) -> str:
    """Return the checkpoint that ``--checkpoint_path`` means, or the newest whole one in ``--model_dir``.

    Raises:
        CheckpointError: If there is none.
    """
    if path := config.checkpoint_path:
        if not os.path.isfile(file_of(path, INDEX)):
            given, index = show(path, 200), show(f"{path}.index", 200)
            name = path.removesuffix(".index")
            told = f"give its name without the suffix, {show(name, 200)}" if name != path else f"there is no {index}"
            raise CheckpointError(f"--checkpoint_path={given} is not a checkpoint: {told}.")
        return path
    warn_about_state_file(config.model_dir)
    for saved in sealed(config.model_dir):
        log.warning("%s is saved but not yet in its place: the job brings it in when it goes on.", saved)
    finder = Finder(config.model_dir)
    if path := finder.newest():
        return path
    if finder.damaged:
        raise no_intact_checkpoint(config.model_dir, finder.damaged)
    given = show(config.model_dir or "", 200)
    raise CheckpointError(f"--model_dir={given} holds no checkpoint (model.ckpt-*): train first.")


class Finder:
    """Finds the newest whole checkpoint of a directory, any number of times: each is read once, and told once.

    Attributes:
        damaged: Those that were passed over, with what is wrong.
    """

    def __init__(self, model_dir: str | None) -> None:
        self._dir = model_dir
        self._known: dict[tuple[str, int], str | None] = {}
        self.damaged: dict[str, str] = {}

    def newest(self) -> str | None:
        """Return the newest whole checkpoint's path, ``None`` if there is none."""
        self.damaged = {}
        for path in reversed(list_checkpoints(self._dir)):
            why = self._problem(path)
            if why is None:
                return path
            self.damaged[path] = why
        return None

    def _problem(self, path: str) -> str | None:
        key = path, _written(path)
        if key not in self._known:
            self._known[key] = why = problem(path)
            if why is not None and path in list_checkpoints(self._dir):  # it may have been deleted meanwhile
                warn_about_damage(path, why)
        return self._known[key]


def _written(path: str) -> int:
    """Return a time in ns that differs when a step has been saved anew; 0 without an index."""
    try:
        return file_of(path, INDEX).stat().st_mtime_ns
    except OSError:
        return 0


def warn_about_damage(path: str, why: str) -> None:
    """Log that a checkpoint is passed over."""
    log.warning("checkpoint %s is damaged: %s. The one before it is looked at.", path, why)


def warn_about_state_file(model_dir: str | None) -> None:
    """Log it if the ``checkpoint`` state file is damaged; nothing depends on it here."""
    path = Path(model_dir or "") / _STATE
    if not model_dir or not os.path.isfile(path):
        return
    if why := _state_problem(path):
        log.warning("%s %s: the files tell which checkpoint is the newest.", path, why)


def sealed(model_dir: str | None) -> Sequence[str]:
    """Return the checkpoints that are all on the disk, and not in their places: the job was lost as it saved them."""
    return [path for staged in _stagings(model_dir or "") for path in _sealed(staged)] if model_dir else []


def _state_problem(path: Path) -> str | None:
    try:
        text = read_file(path).decode()
    except ValueError:
        return "is garbled"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    newest = re.search(r'^model_checkpoint_path: "(.+)"$', text, re.MULTILINE)
    if not newest:
        return "is garbled" if text else "is empty"
    name = Path(newest[1]).name
    return None if os.path.isfile(file_of(path.parent / name, INDEX)) else f"names {name}, which is not there"


def no_intact_checkpoint(model_dir: str | None, damaged: Mapping[str, str]) -> CheckpointError:
    """Return the error that there are checkpoints, and none can be used."""
    told = ", ".join(f"{Path(path).name} ({why})" for path, why in damaged.items())
    return CheckpointError(
        f"--model_dir={show(model_dir or '', 200)} holds no whole checkpoint: {told}. "
        "Put a copy back; or move these files away to begin at step 0."
    )


def stage(model_dir: str) -> Path:
    """Return a new directory in which to save ``model.ckpt``; what a killed chief has left is brought in, or deleted.

    Raises:
        StorageError: If ``--model_dir`` is not there, and cannot be made.
        OSError: If it cannot be written.
    """
    make_dir(Path(model_dir))
    recover_staging(model_dir)
    staged = Path(model_dir) / f"{_STAGING}{uuid.uuid4().hex}"
    staged.mkdir()
    return staged


def publish(staged: Path, path: str, kept: Sequence[str], partial_updates: int = 0) -> None:
    """Bring in the checkpoint that was saved in a directory of ``stage``; what there is of the same step goes first.

    Args:
        staged: The directory.
        path: What the checkpoint is to be.
        kept: The checkpoints, in the order of their steps, that there are to be then; this is the last.
        partial_updates: See ``manifest.seal``.

    Raises:
        OSError: If that fails; what was sealed then is brought in by the next ``stage``, or the next chief.
        StorageError: If the checkpoint is in its place, and only the state file is not.
    """
    final = Path(path)
    for file in list(staged.glob(f"{BASE}.*")):
        os.replace(file, staged / file.name.replace(BASE, final.name, 1))
    seal(staged / final.name, partial_updates)
    write_flushed(staged / _WRITTEN, _state(kept))
    os.replace(staged / _WRITTEN, staged / _STATE)  # all of it, or none: there may be no room
    _bring_in(staged, path)


def _bring_in(staged: Path, path: str) -> None:
    """Move the files of a checkpoint to where they belong, or those that are not there yet."""
    sealed, model_dir = staged / Path(path).name, staged.parent
    if file_of(sealed, MANIFEST).exists():  # else only the index is left to move
        files = [file_of(sealed, suffix) for suffix in listed(file_of(sealed, MANIFEST)) if suffix != INDEX]
        waiting = [file for file in files if file.exists()]
        remove(path, keep={file.name for file in files} - {file.name for file in waiting})
        for file in [*waiting, file_of(sealed, MANIFEST)]:
            os.replace(file, model_dir / file.name)
        _flush(model_dir)
    os.replace(file_of(sealed, INDEX), file_of(path, INDEX))
    try:
        os.replace(staged / _STATE, model_dir / _STATE)
    except OSError as error:
        why = "it is a directory" if isinstance(error, IsADirectoryError) else error.strerror
        told = f"{model_dir / _STATE} cannot be written: {why}. Remove it; {sealed.name} itself is saved."
        raise StorageError(f"--model_dir: {told}") from None
    _flush(model_dir)


def _state(kept: Sequence[str]) -> str:
    """Return a state file as TensorFlow's own, a CheckpointState, with names relative to its directory."""
    names = [Path(path).name for path in kept]
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    return "\n".join(lines) + "\n"


def mend_state(kept: Sequence[str]) -> None:
    """Write the state file, if it does not name the last of some checkpoints: TensorFlow's own tools read nothing else.

    Raises:
        StorageError: If it cannot be written.
    """
    path, newest = Path(kept[-1]).parent / _STATE, Path(kept[-1]).name
    with contextlib.suppress(OSError, ValueError):
        if f'model_checkpoint_path: "{newest}"' in read_file(path).decode().splitlines():
            return
    write_text(path, _state(kept))


def _flush(directory: Path) -> None:
    """Bring the names in a directory to the disk, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def discard_staging(staged: Path) -> None:
    """Delete a directory of ``stage``, unless a checkpoint is in it that is sealed and in no other place."""
    with contextlib.suppress(OSError, StorageError):
        if _sealed(staged):
            return
        (staged / _STATE).unlink(missing_ok=True)  # first of all: so it is not taken for sealed when half is gone
        for path in [path_of(staged.parent, step) for step in _unfinished(staged)]:
            if not file_of(path, INDEX).exists():  # else it was not reached: this is an earlier checkpoint
                remove(path)
    shutil.rmtree(staged, ignore_errors=True)


def _sealed(staged: Path) -> Sequence[str]:
    """Return the checkpoint that has yet to be brought in from a directory, all of it being on the disk."""
    if not (staged / _STATE).exists():
        return []
    return [path_of(staged.parent, step) for step in _unfinished(staged)]


def recover_staging(model_dir: str) -> None:
    """Bring in the checkpoint that a killed chief had got to the disk, and delete what else it has left of a save.

    Raises:
        OSError: If it cannot be brought in.
    """
    for staged in _stagings(model_dir):
        for path in _sealed(staged):
            try:
                _bring_in(staged, path)
            except ValueError:  # the manifest is damaged: nothing is known of the other files
                (staged / _STATE).unlink()
            except StorageError as error:  # the checkpoint is there: it can be gone on from
                log.info("%s", error)
            else:
                log.info("brought in %s, which was saved when the chief was lost", path)
        discard_staging(staged)


def remove(path: str, keep: Collection[str] = ()) -> None:
    """Delete a checkpoint, but for some of its files: first of all its index, so that nothing else takes it for one."""
    others = Path(path).parent.glob(f"{Path(path).name}.data-*")
    for file in [file_of(path, INDEX), *others, file_of(path, "meta"), file_of(path, MANIFEST)]:
        if file.name not in keep:
            file.unlink(missing_ok=True)
