"""Checkpoints that tests make and spoil, without a job."""

import contextlib
import errno
import io
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

from tfps import storage  # noqa: E402
from tfps.cluster.spec import Cluster  # noqa: E402
from tfps.runtime.checkpoint import manifest  # noqa: E402
from tfps.runtime.checkpoint.directory import list_checkpoints  # noqa: E402
from tfps.runtime.checkpoint.manager import CheckpointManager  # noqa: E402
from tfps.runtime.checkpoint.ownership import Ownership  # noqa: E402


class Training:
    """A graph with a weight and a step on this machine, in place of a job."""

    def __init__(self, model_dir: Path, shape: tuple[int, ...] = (4,), name: str = "weight") -> None:
        with tf.Graph().as_default() as graph:
            self.step = tf.train.get_or_create_global_step()
            self.weight = tf.get_variable(name, shape, initializer=tf.ones_initializer())
            self.session = tf.Session(graph=graph)
            self.session.run(tf.global_variables_initializer())
            self.saver = tf.train.Saver()
            self.owner = Ownership(str(model_dir), Cluster(("a:1",), ("b:1",)))
            self.checkpoints = CheckpointManager(str(model_dir), every_secs=0.0, owner=self.owner)

    def save(self, step: int, patiently: bool = False) -> None:
        """Save as of some step; ``patiently`` is what is done now and then, as training goes on."""
        self.step.load(step, self.session)
        save = self.checkpoints.try_save if patiently else self.checkpoints.save
        save(self.session, step)

    def resume(self) -> int | None:
        """Return the step of the checkpoint that it goes on from, and has the values of."""
        path = self.checkpoints.restore_latest(self.session)
        step = int(self.session.run(self.step))
        assert path is None or path.endswith(f"/model.ckpt-{step}")
        return step if path else None


def damage(path: Path, how: str) -> None:
    """Damage a checkpoint's file."""
    data = path.read_bytes()
    wrong = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "flipped": data[:8] + bytes([data[8] ^ 255]) + data[9:],
        "garbled": bytes(range(256)) * 8,
    }
    path.write_bytes(wrong[how])


@contextlib.contextmanager
def full_disk(limit_bytes: int = 1000) -> Iterator[None]:
    """Let no file grow beyond a limit, which is as near to a full disk as a test gets without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def unreadable(file: Path, times: int = 1 << 30) -> Iterator[list[Path]]:
    """Let the next reads of a file fail as those of a network file system do; yields the reads, with the later ones."""
    really, tried = storage.open_file, list[Path]()

    def open_file(path: Path) -> io.FileIO:
        if path != file:
            return really(path)
        tried.append(path)
        if len(tried) <= times:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return really(path)

    with (
        mock.patch.object(storage, "open_file", open_file),
        mock.patch.object(manifest, "open_file", open_file),
        mock.patch.object(storage, "_AGAIN_SECS", 0.01),
    ):
        yield tried


HOW = ["truncated", "empty", "flipped", "garbled", "missing"]


FILES = ["index", "data-00000-of-00001"]


def spoil(path: Path, how: str) -> None:
    """Damage a checkpoint's file, or delete it."""
    path.unlink() if how == "missing" else damage(path, how)


def steps_in(model_dir: Path) -> list[int]:
    """Return the steps of a directory's checkpoints; fails if there is anything else of checkpoints in it."""
    suffixes = ["data-00000-of-00001", "index", "manifest.json"]
    steps = sorted(int(path.rpartition("-")[2]) for path in list_checkpoints(str(model_dir)))
    files = {f"model.ckpt-{step}.{suffix}" for step in steps for suffix in suffixes}
    assert {path.name for path in model_dir.iterdir()} - {"checkpoint", ".chief"} == files
    return steps


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what tfps has said; TensorFlow warns of ``Variable.load`` in whichever test of a process is the first."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("tfps")]


def damage_reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of damage since the last time."""
    damage = [text for text in caplog.messages if "is damaged: " in text]
    caplog.clear()
    return damage
