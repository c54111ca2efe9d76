"""How a checkpoint is published in ``--model_dir``: whole, or not at all.

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
import shutil
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from tfps.errors import StorageError
from tfps.runtime.checkpoint.directory import sealed_in, staging_directories, unfinished_steps
from tfps.runtime.checkpoint.manifest import INDEX, MANIFEST, file_of, listed, seal, write_flushed
from tfps.storage import CHECKPOINT_NAME, JobDirectory, make_dir, read_file, write_text

_WRITTEN = "checkpoint.written"  # the state file while it is being written
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # raised by shared folders of virtual machines, and by FUSE

log = logging.getLogger(__name__)


def stage(model_dir: str) -> Path:
    """Return a new directory in which to save ``model.ckpt``; first publish or delete what a killed chief has left.

    Raises:
        StorageError: If ``--model_dir`` does not exist and cannot be created.
        OSError: If it cannot be written.
    """
    make_dir(Path(model_dir))
    recover_staging(model_dir)
    staged = JobDirectory(model_dir).staging(uuid.uuid4().hex)
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
        OSError: If that fails; a checkpoint that was sealed is published by a later ``stage``, or the next chief.
        StorageError: If the checkpoint is in place, and only the state file is not.
    """
    final = Path(path)
    for file in list(staged.glob(f"{CHECKPOINT_NAME}.*")):
        os.replace(file, staged / file.name.replace(CHECKPOINT_NAME, final.name, 1))
    seal(staged / final.name, partial_updates)
    write_flushed(staged / _WRITTEN, _state_text(kept))
    # Rename it in one step, as the disk may have been full while writing.
    os.replace(staged / _WRITTEN, JobDirectory(staged).state_file)
    _move_into_place(staged, path)


def _move_into_place(staged: Path, path: str) -> None:
    """Move the files of a checkpoint that are not yet in place."""
    sealed, model_dir = staged / Path(path).name, staged.parent
    state_file = JobDirectory(model_dir).state_file
    if file_of(sealed, MANIFEST).exists():  # else only the index and the state file remain
        files = [file_of(sealed, suffix) for suffix in listed(file_of(sealed, MANIFEST)) if suffix != INDEX]
        waiting = [file for file in files if file.exists()]
        remove(path, keep={file.name for file in files} - {file.name for file in waiting})
        for file in [*waiting, file_of(sealed, MANIFEST)]:
            os.replace(file, model_dir / file.name)
        _flush(model_dir)
    os.replace(file_of(sealed, INDEX), file_of(path, INDEX))
    try:
        os.replace(JobDirectory(staged).state_file, state_file)
    except OSError as error:
        why = "it is a directory" if isinstance(error, IsADirectoryError) else error.strerror
        raise StorageError(
            f"--model_dir: {state_file} cannot be written: {why}. Remove it; {sealed.name} itself is saved."
        ) from None
    _flush(model_dir)


def _state_text(kept: Sequence[str]) -> str:
    """Return the text of a state file like TensorFlow's (a CheckpointState), with names relative to its directory."""
    names = [Path(path).name for path in kept]
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    return "\n".join(lines) + "\n"


def mend_state(kept: Sequence[str]) -> None:
    """Write the state file if it does not name the last of ``kept``: TensorFlow's own tools read nothing else.

    Raises:
        StorageError: If it cannot be written.
    """
    path, newest = JobDirectory(Path(kept[-1]).parent).state_file, Path(kept[-1]).name
    with contextlib.suppress(OSError, ValueError):
        if f'model_checkpoint_path: "{newest}"' in read_file(path).decode().splitlines():
            return
    write_text(path, _state_text(kept))


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
        if sealed_in(staged):
            return
        # First, because otherwise a half-deleted directory would count as sealed.
        JobDirectory(staged).state_file.unlink(missing_ok=True)
        for path in [JobDirectory(staged.parent).checkpoint(step) for step in unfinished_steps(staged)]:
            if not file_of(path, INDEX).exists():  # else publishing had not started, and this is an earlier checkpoint
                remove(path)
    shutil.rmtree(staged, ignore_errors=True)


def recover_staging(model_dir: str) -> None:
    """Publish what a killed chief, or a save that failed, had fully written, and delete the rest of such saves.

    One that cannot be published stays where it is, and keeps no other from being saved.

    Raises:
        StorageError: If the directory cannot be read.
    """
    for staged in staging_directories(model_dir):
        for path in sealed_in(staged):
            try:
                _recover(staged, path)
            except OSError as error:
                log.warning("%s is saved, but cannot be moved from %s into place: %s", path, staged.name, error)
        discard_staging(staged)


def _recover(staged: Path, path: str) -> None:
    """Publish a checkpoint of an earlier save, or give it up if it is damaged, or if its step was saved again since."""
    try:
        if not _was_saved_since(staged, path):
            _move_into_place(staged, path)
            log.info("published %s, which was saved when the chief was lost", path)
            return
    except ValueError:  # the manifest is damaged, so nothing is known of the other files
        pass
    except StorageError as error:  # only the state file failed, so the job can continue from the checkpoint
        log.info("%s", error)
        return
    JobDirectory(staged).state_file.unlink()


def _was_saved_since(staged: Path, path: str) -> bool:
    """Return whether a checkpoint in place is of a later save than the one of the same step that waits."""
    with contextlib.suppress(FileNotFoundError):
        return file_of(path, INDEX).stat().st_mtime > JobDirectory(staged).state_file.stat().st_mtime
    return False


def remove(path: str, keep: Collection[str] = ()) -> None:
    """Delete a checkpoint except some files; delete its index first, so that no reader takes the rest for one."""
    others = Path(path).parent.glob(f"{Path(path).name}.data-*")
    for file in [file_of(path, INDEX), *others, file_of(path, "meta"), file_of(path, MANIFEST)]:
        if file.name not in keep:
            file.unlink(missing_ok=True)
