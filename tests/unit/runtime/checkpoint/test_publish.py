"""A checkpoint is put in place whole, or not at all."""

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, Training, full_disk, steps_in

from tfps.errors import StorageError
from tfps.runtime.checkpoint import publish
from tfps.runtime.checkpoint.directory import list_checkpoints
from tfps.runtime.checkpoint.manifest import problem


def test_no_room_for_the_last_file_leaves_nothing(tmp_path: Path) -> None:
    """A save whose state file alone finds no room has failed: the old one and its state file stay, and nothing else."""
    run = Training(tmp_path)
    run.save(1)
    state = (tmp_path / "checkpoint").read_bytes()
    real = publish.write_flushed

    def no_room(path: Path, text: str) -> None:
        real(path, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(publish, "write_flushed", no_room), pytest.raises(StorageError):
        run.save(2)
    assert steps_in(tmp_path) == [1]
    assert Training(tmp_path).resume() == 1
    assert (tmp_path / "checkpoint").read_bytes() == state


def test_a_directory_in_place_of_the_state_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names ``checkpoint`` and says what to do; the checkpoint is whole, also where a chief was lost."""
    caplog.set_level(logging.INFO, "tfps")
    (tmp_path / "checkpoint").mkdir()
    run = Training(tmp_path)
    reported = "checkpoint cannot be written: it is a directory. Remove it; model.ckpt-{} itself is saved."
    with pytest.raises(StorageError, match=re.escape(f"--model_dir: {tmp_path}/{reported.format(1)}")):
        run.save(1)
    with mock.patch.object(publish, "_move_into_place", side_effect=OSError), pytest.raises(StorageError):
        run.save(2)
    later = Training(tmp_path)
    assert later.resume() == 2
    assert reported.format(2) in caplog.text
    (tmp_path / "checkpoint").rmdir()
    later.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


@pytest.mark.parametrize("act", [lambda run: run.resume(), lambda run: run.save(5)])
def test_a_link_that_is_named_like_a_save_is_not_followed(tmp_path: Path, act: Callable[[Training], Any]) -> None:
    """What is left of a save is brought in or deleted in directories of ``--model_dir`` only, not behind a link."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("precious", "model.ckpt-7.index", "checkpoint"):
        (other / name).write_text(name)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / ".saving-link").symlink_to(other)
    act(Training(tmp_path / "m"))
    assert {path.name: path.read_text() for path in other.iterdir()} == {
        name: name for name in ("precious", "model.ckpt-7.index", "checkpoint")
    }
    assert (tmp_path / "m" / ".saving-link").is_symlink()


def test_a_file_system_that_cannot_flush_directories_is_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse it, as shared folders of virtual machines do: what is written there is there."""
    really, refused = os.fsync, []

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    training = Training(tmp_path)
    training.save(5)
    assert refused
    assert training.resume() == 5


def test_a_state_file_that_cannot_be_replaced_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save says that only the state file is missing; what is too old is deleted, and the newest is known."""
    really = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target) == tmp_path / "checkpoint":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    training = Training(tmp_path)
    for step in range(1, 9):
        with pytest.raises(StorageError, match=f"checkpoint cannot be written: .*model.ckpt-{step} itself is saved"):
            training.save(step)
        assert training.checkpoints.newest == str(tmp_path / f"model.ckpt-{step}")
    assert [Path(path).name for path in list_checkpoints(str(tmp_path))] == [
        f"model.ckpt-{step}" for step in range(4, 9)
    ]
    assert training.resume() == 8


def test_a_save_that_stays_out_of_place_keeps_no_later_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is warned about at each save, which is published; it comes into place as soon as that is possible."""
    training, in_its_way = Training(tmp_path), tmp_path / "model.ckpt-2.data-00000-of-00001"
    training.save(1)
    in_its_way.mkdir()
    with pytest.raises(StorageError, match=f"cannot be written: .*{in_its_way}"):
        training.save(2)
    training.save(3)
    assert training.checkpoints.newest == str(tmp_path / "model.ckpt-3")
    assert f"{tmp_path}/model.ckpt-2 is saved, but cannot be moved from .saving-" in caplog.text
    assert Training(tmp_path).resume() == 3
    in_its_way.rmdir()
    training.save(4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.glob(".saving-*")) == []
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-4")


def test_a_save_that_stays_out_of_place_replaces_no_later_one_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may be saved again at rest, with updates that were on their way: those are not lost to the first one."""
    training, really = Training(tmp_path), os.replace
    with mock.patch.object(publish, "_move_into_place", side_effect=OSError), pytest.raises(StorageError):
        training.save(2)
    [old] = tmp_path.glob(".saving-*")

    def replace(source: Any, target: Any) -> None:
        if Path(source).parent == old:
            raise OSError(errno.EIO, "Input/output error")
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    training.weight.load([7.0] * 4, training.session)
    training.save(2)
    assert old.is_dir()
    training.save(3)
    assert tf.train.load_variable(str(tmp_path / "model.ckpt-2"), "weight").tolist() == [7.0] * 4
    assert steps_in(tmp_path) == [2, 3]
    assert not old.exists()


def test_a_state_file_that_is_not_there_is_written_with_the_last_save(tmp_path: Path) -> None:
    """Also where there is nothing else to save any more: without it, TensorFlow's own tools begin at step 0."""
    training = Training(tmp_path)
    for step in (3, 4):
        training.save(step)
    for spoiled in (lambda path: path.unlink(), lambda path: path.write_text("x")):
        spoiled(tmp_path / "checkpoint")
        training.save(4)
        assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-4")
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(StorageError, match="checkpoint cannot be written: Is a directory"):
        training.save(4)


def test_a_full_disk_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that finds no room is reported and training goes on; the last one, at the end, is a StorageError."""
    caplog.set_level(logging.INFO, "tfps")
    run = Training(tmp_path, (10_000,))
    run.save(1)
    with full_disk():
        run.save(2, patiently=True)
        with pytest.raises(StorageError, match=r"--model_dir: .*model\.ckpt-3 cannot be written: "):
            run.save(3)
    assert "model.ckpt-2 cannot be written" in caplog.text
    assert "Training continues" in caplog.text
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]
    run.save(4, patiently=True)
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / f"model.ckpt-{step}") for step in (1, 4)]


@contextlib.contextmanager
def disk(path: Path, size: str) -> Iterator[Path]:
    """Yield a small disk of its own; skips the test where none can be mounted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_leaves_the_old_one_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a real disk, a save finds no room at any point: nothing partial is left; with room again, it is saved."""
    caplog.set_level(logging.INFO, "tfps")
    with disk(tmp_path / "m", "1m") as path:
        run = Training(path, (100_000,))
        run.save(1)
        filler = path / "filler"
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        for step, left in enumerate(range(0, 400_000 + 5 * 4096, 4096 * 4), 2):
            filler.write_bytes(b"x" * (free - left))
            with pytest.raises(StorageError, match=rf"--model_dir: .*model\.ckpt-{step} cannot be written: "):
                run.save(step)
            run.save(step, patiently=True)
            filler.unlink()
            assert steps_in(path) == [1]
            assert problem(str(path / "model.ckpt-1")) is None
        assert "No space left on device" in caplog.text
        run.save(100)
        assert steps_in(path) == [1, 100]
        assert Training(path, (100_000,)).resume() == 100
        run.session.close()


def test_a_read_only_disk_leaves_the_old_one_whole(tmp_path: Path) -> None:
    """A directory that has become read-only is a StorageError; when it can be written again, so is a checkpoint."""
    with disk(tmp_path / "m", "1m") as path:
        run = Training(path)
        run.save(1)
        for options, step in (("remount,ro", 2), ("remount,rw", 3)):
            subprocess.run(["mount", "-o", options, str(path)], check=True)
            if step == 2:
                with pytest.raises(StorageError, match=r"model\.ckpt-2 cannot be written: .*Read-only"):
                    run.save(2)
                assert Training(path).resume() == 1
            else:
                run.save(3)
        assert steps_in(path) == [1, 3]


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, call: str) -> None:
    """However far a save has come when its directory vanishes, it fails as a StorageError, and the next one works."""
    path, real = tmp_path / "m" / "n", getattr(os, call)
    run = Training(path)
    for nth in itertools.count(1):
        calls = itertools.count(1)

        def vanishing(*args: Any, nth: int = nth, calls: Any = calls, **kwargs: Any) -> Any:
            if next(calls) == nth:
                shutil.rmtree(path.parent)
            return real(*args, **kwargs)

        with mock.patch.object(os, call, vanishing), contextlib.suppress(StorageError):
            run.save(2 * nth)
        if next(calls) <= nth:
            break
        left = steps_in(path) if path.exists() else []
        assert left in ([], [2 * nth])
        run.save(2 * nth + 1)
        assert steps_in(path) == [*left, 2 * nth + 1]
        assert Training(path).resume() == 2 * nth + 1
    assert nth > 1


def test_all_is_on_the_disk_before_it_counts(tmp_path: Path) -> None:
    """Each file is flushed before it is renamed; and the directory, before the index is renamed and at the end."""
    run, happened, fsync, replace = Training(tmp_path), [], os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        happened.append(("flushed", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        happened.append((target.name if target.parent == tmp_path else "staged", source.stat().st_ino))
        replace(source, target)

    with mock.patch.object(os, "fsync", flushed), mock.patch.object(os, "replace", renamed):
        run.save(7)
    here = ("flushed", tmp_path.stat().st_ino)
    files = {what: at for at, (what, _) in enumerate(happened) if what not in ("flushed", "staged")}
    assert list(files) == [f"model.ckpt-7.{file}" for file in (FILES[1], "manifest.json", FILES[0])] + ["checkpoint"]
    for at in files.values():
        assert ("flushed", happened[at][1]) in happened[: min(files.values())]
    assert happened[files["model.ckpt-7.index"] - 1] == happened[-1] == here


def test_a_save_that_fails_half_way_loses_neither(tmp_path: Path) -> None:
    """Where a save over one of the same step cannot move a file, whichever, the next chief finds it whole."""
    real, failed = os.replace, 0
    for nth in itertools.count(1):
        run = Training(tmp_path / str(nth))
        run.save(1)
        run.weight.load([nth] * 4, run.session)
        calls = itertools.count(1)

        def replace(*names: Any, calls: Any = calls, nth: int = nth) -> None:
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            real(*names)

        run.checkpoints._consistent.clear()
        with mock.patch.object(os, "replace", replace), contextlib.suppress(StorageError):
            run.save(1)
            break
        failed += 1
        assert Training(tmp_path / str(nth)).resume() == 1, f"after the {nth}. move"
        assert [path.name for path in (tmp_path / str(nth)).glob(".*")] == []
    assert failed >= 5  # two to their names, two into their place, the index, the state
