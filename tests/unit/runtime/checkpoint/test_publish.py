"""A checkpoint is put in place whole, or not at all."""

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import Training, steps_in

from tfps.errors import StorageError
from tfps.runtime.checkpoint import publish
from tfps.runtime.checkpoint.directory import list_checkpoints


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
