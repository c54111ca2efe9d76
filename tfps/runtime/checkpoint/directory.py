"""The contents of ``--model_dir``, and how a checkpoint is published in it: whole, or not at all.

A checkpoint exists when its index exists. It is published in these steps:

1. Everything is written to a separate directory below ``--model_dir``, and flushed: the data, the index, the manifest,
   and the next ``checkpoint`` state file.
2. The data files are renamed to their final names, and then the manifest.
3. The index is renamed. From now on, the checkpoint exists.
4. The state file, which TensorFlow's own tools read, is renamed. Old checkpoints are deleted, each index first.

The state file is written last in step 1 and renamed last. While it is in that directory, all of the checkpoint is on
the disk, here or there. If a chief was killed then, the next one publishes the rest. One checkpoint is whole at any
time, even if one of the same step is removed first. A chief killed earlier left nothing of use. Imports no TensorFlow.
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

from tfps.config.job_config import STARTED_AGAIN, JobConfig
from tfps.errors import CheckpointError, StorageError
from tfps.runtime.checkpoint import file_clock
from tfps.runtime.checkpoint.manifest import INDEX, MANIFEST, file_of, listed, problem, seal, write_flushed
from tfps.storage import SUMMARY, make_dir, read_file, read_json, write_text
from tfps.text import show

BASE = "model.ckpt"
_STATE, _WRITTEN, _STAGING = "checkpoint", "checkpoint.written", ".saving-"
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # raised by shared folders of virtual machines, and by FUSE
_NAME = re.compile(r"model\.ckpt-(\d+)\.(index|manifest\.json|data-\d{5}-of-\d{5})")

_BEGAN = time.monotonic()  # when this process started

log = logging.getLogger(__name__)


def list_checkpoints(model_dir: str | None) -> list[str]:
    """Return the paths of a directory's checkpoints in the order of their steps; some may be damaged.

    The files count, not the ``checkpoint`` state file: a damaged one must not send a job back to step 0. Neither must a
    lost index, so the remaining files of its checkpoint count, too.

    Raises:
        StorageError: If the directory exists and cannot be read.
    """
    if not model_dir:
        return []
    found = [(int(match[1]), match[2]) for name in _names(model_dir) if (match := _NAME.fullmatch(name))]
    unfinished = {step for staged in _stagings(model_dir) for step in _unfinished(staged)}
    steps = {step for step, suffix in found if suffix == INDEX or step not in unfinished}
    return [path_of(model_dir, step) for step in sorted(steps)]


def _names(directory: str | Path) -> Sequence[str]:
    """Return the names in a directory; none if it does not exist, or no longer does."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"--model_dir: {directory} cannot be read: {error.strerror}.") from None


def _stagings(model_dir: str) -> Sequence[Path]:
    """Return the directories in which a checkpoint is saved now, or was when the chief was killed; no links."""
    found = [Path(model_dir) / name for name in _names(model_dir) if name.startswith(_STAGING)]
    return [path for path in found if not path.is_symlink()]


def _unfinished(staged: Path) -> Sequence[int]:
    """Return the step that is saved in a staging directory, as long as its index has not been renamed."""
    return [int(found[1]) for name in _names(staged) if (found := _NAME.fullmatch(name)) and found[2] == INDEX]


def path_of(model_dir: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return str(Path(model_dir) / f"{BASE}-{step}")


def step_in(path: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.rpartition("-")[2])


def ended(config: JobConfig) -> bool:
    """Return whether the job's summary reports that the job ended, and not long ago.

    A task that was lost near the end of its job and then restarted finds no other task. A task that is started for the
    first time after that end belongs to another run, which continues if there is something left to train.
    """
    path = Path(config.model_dir or ".") / SUMMARY
    summary = read_json(path) if config.model_dir else None
    if not summary or summary.get("status") != "done" or summary.get("max_steps") != config.max_steps:
        return False
    age_secs = abs(file_clock.now(path.parent) - path.stat().st_mtime)
    is_later = age_secs > time.monotonic() - _BEGAN and not os.environ.get(STARTED_AGAIN)
    if is_later and int(summary.get("global_step") or 0) < config.max_steps:
        return False
    is_there = os.path.isfile(file_of(str(summary.get("checkpoint")), INDEX))  # else the job has to start again
    return is_there and age_secs < config.patience_secs


def select_checkpoint(config: JobConfig) -> str:
    """Return the checkpoint that ``--checkpoint_path`` names, or the newest intact one in ``--model_dir``.

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
    """Find the newest intact checkpoint of a directory, any number of times; read and report each one only once.

    Attributes:
        damaged: The checkpoints that were skipped, with the damage of each.
    """

    def __init__(self, model_dir: str | None) -> None:
        self._dir = model_dir
        self._known: dict[tuple[str, int], str | None] = {}
        self.damaged: dict[str, str] = {}

    def newest(self) -> str | None:
        """Return the path of the newest intact checkpoint, or ``None`` if there is none."""
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
            if why is not None and path in list_checkpoints(self._dir):  # else it was deleted while it was read
                warn_about_damage(path, why)
        return self._known[key]


def _written(path: str) -> int:
    """Return a time in ns that changes when a step is saved again; 0 without an index."""
    try:
        return file_of(path, INDEX).stat().st_mtime_ns
    except OSError:
        return 0


def warn_about_damage(path: str, why: str) -> None:
    """Log that a damaged checkpoint is skipped."""
    log.warning("checkpoint %s is damaged: %s. The one before it is looked at.", path, why)


def warn_about_state_file(model_dir: str | None) -> None:
    """Log a warning if the ``checkpoint`` state file is damaged; nothing here depends on it."""
    path = Path(model_dir or "") / _STATE
    if not model_dir or not os.path.isfile(path):
        return
    if why := _state_problem(path):
        log.warning("%s %s: the files tell which checkpoint is the newest.", path, why)


def sealed(model_dir: str | None) -> Sequence[str]:
    """Return the checkpoints that are fully on the disk but not in place, because the job was lost as it saved them."""
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
    """Return the error that there are checkpoints but none can be used."""
    told = ", ".join(f"{Path(path).name} ({why})" for path, why in damaged.items())
    return CheckpointError(
        f"--model_dir={show(model_dir or '', 200)} holds no whole checkpoint: {told}. "
        "Put a copy back; or move these files away to begin at step 0."
    )


def stage(model_dir: str) -> Path:
    """Return a new directory in which to save ``model.ckpt``; first publish or delete what a killed chief has left.

    Raises:
        StorageError: If ``--model_dir`` does not exist and cannot be created.
        OSError: If it cannot be written.
    """
    make_dir(Path(model_dir))
    recover_staging(model_dir)
    staged = Path(model_dir) / f"{_STAGING}{uuid.uuid4().hex}"
    staged.mkdir()
    return staged


def publish(staged: Path, path: str, kept: Sequence[str], partial_updates: int = 0) -> None:
    """Publish the checkpoint that was saved in a directory of ``stage``; first remove files of the same step.

    Args:
        staged: The directory.
        path: The final path of the checkpoint.
        kept: The checkpoints to exist afterwards, in the order of their steps; the last is this one.
        partial_updates: See ``manifest.seal``.

    Raises:
        OSError: If that fails; a checkpoint that was sealed is published by the next ``stage``, or the next chief.
        StorageError: If the checkpoint is in place, and only the state file is not.
    """
    final = Path(path)
    for file in list(staged.glob(f"{BASE}.*")):
        os.replace(file, staged / file.name.replace(BASE, final.name, 1))
    seal(staged / final.name, partial_updates)
    write_flushed(staged / _WRITTEN, _state(kept))
    os.replace(staged / _WRITTEN, staged / _STATE)  # in one step, as the disk may have been full while writing
    _bring_in(staged, path)


def _bring_in(staged: Path, path: str) -> None:
    """Move the files of a checkpoint that are not yet in place."""
    sealed, model_dir = staged / Path(path).name, staged.parent
    if file_of(sealed, MANIFEST).exists():  # else only the index and the state file remain
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
    """Return the text of a state file like TensorFlow's (a CheckpointState), with names relative to its directory."""
    names = [Path(path).name for path in kept]
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    return "\n".join(lines) + "\n"


def mend_state(kept: Sequence[str]) -> None:
    """Write the state file if it does not name the last of ``kept``: TensorFlow's own tools read nothing else.

    Raises:
        StorageError: If it cannot be written.
    """
    path, newest = Path(kept[-1]).parent / _STATE, Path(kept[-1]).name
    with contextlib.suppress(OSError, ValueError):
        if f'model_checkpoint_path: "{newest}"' in read_file(path).decode().splitlines():
            return
    write_text(path, _state(kept))


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk, where the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def discard_staging(staged: Path) -> None:
    """Delete a directory of ``stage``, unless it holds the only copy of a sealed checkpoint."""
    with contextlib.suppress(OSError, StorageError):
        if _sealed(staged):
            return
        (staged / _STATE).unlink(missing_ok=True)  # first: otherwise a half-deleted directory would count as sealed
        for path in [path_of(staged.parent, step) for step in _unfinished(staged)]:
            if not file_of(path, INDEX).exists():  # else publishing had not started, and this is an earlier checkpoint
                remove(path)
    shutil.rmtree(staged, ignore_errors=True)


def _sealed(staged: Path) -> Sequence[str]:
    """Return the checkpoint in a directory that is fully on the disk and not yet published."""
    if not (staged / _STATE).exists():
        return []
    return [path_of(staged.parent, step) for step in _unfinished(staged)]


def recover_staging(model_dir: str) -> None:
    """Publish the checkpoint that a killed chief had fully written, and delete the rest of its save.

    Raises:
        OSError: If it cannot be published.
    """
    for staged in _stagings(model_dir):
        for path in _sealed(staged):
            try:
                _bring_in(staged, path)
            except ValueError:  # the manifest is damaged, so nothing is known of the other files
                (staged / _STATE).unlink()
            except StorageError as error:  # only the state file failed, so the job can continue from the checkpoint
                log.info("%s", error)
            else:
                log.info("brought in %s, which was saved when the chief was lost", path)
        discard_staging(staged)


def remove(path: str, keep: Collection[str] = ()) -> None:
    """Delete a checkpoint except some files; delete its index first, so that no reader takes the rest for one."""
    others = Path(path).parent.glob(f"{Path(path).name}.data-*")
    for file in [file_of(path, INDEX), *others, file_of(path, "meta"), file_of(path, MANIFEST)]:
        if file.name not in keep:
            file.unlink(missing_ok=True)
