"""Which checkpoint of a directory is used, and what is said of the others."""

import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, HOW, Training, damage, damage_reports, said, spoil

from tfps.errors import StorageError
from tfps.runtime.checkpoint import directory
from tfps.runtime.checkpoint.finder import Finder, select_checkpoint
from tfps.runtime.checkpoint.manifest import problem

STATES = {
    b"": "is empty: ",
    b"\x00\xff garbled": "is garbled: ",
    b"model_checkpoint_pa": "is garbled: ",
    b'model_checkpoint_path: "model.ckpt-9"\n': "names model.ckpt-9, which does not exist: ",
}


@pytest.mark.parametrize("state", STATES)
def test_a_damaged_state_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, state: bytes) -> None:
    """A damaged ``checkpoint`` state file is reported in one line, and does not matter; the next save mends it."""
    run = Training(tmp_path)
    run.save(7)
    assert run.resume() == 7
    assert said(caplog) == []
    (tmp_path / "checkpoint").write_bytes(state)
    assert select_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-7")
    assert run.resume() == 7
    assert len(said(caplog)) == 2
    for line in said(caplog):
        assert line.startswith(f"{tmp_path}/checkpoint {STATES[state]}")
    run.save(8)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-8")


@pytest.mark.parametrize(("file", "how"), list(itertools.product(FILES, HOW)))
def test_eval_and_export_use_the_newest_whole_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    """Without ``--checkpoint_path``, it is the newest whole one, and one line names what is damaged."""
    run = Training(tmp_path)
    for step in (5, 7):
        run.save(step)
    spoil(tmp_path / f"model.ckpt-7.{file}", how)
    assert select_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-5")
    [line] = said(caplog) if file != "index" or how != "missing" else damage_reports(caplog)
    assert f"model.ckpt-7.{file}" in line
    given = str(tmp_path / "model.ckpt-5")
    assert select_checkpoint(str(tmp_path), given) == given


def test_a_checkpoint_is_read_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who looks again and again for the newest one reads each once; a step that is saved anew is looked at anew."""
    run = Training(tmp_path)
    run.save(5)
    run.save(7)
    damage(tmp_path / "model.ckpt-7.index", "flipped")
    finder = Finder(str(tmp_path))
    with mock.patch("tfps.runtime.checkpoint.finder.problem", side_effect=problem) as read:
        assert [finder.newest() for _ in range(3)] == [str(tmp_path / "model.ckpt-5")] * 3
        assert [call.args[0][-1] for call in read.call_args_list] == ["7", "5"]
        assert len(damage_reports(caplog)) == 1
        run = Training(tmp_path)
        assert run.resume() == 5
        run.save(7)
        assert [finder.newest() for _ in range(3)] == [str(tmp_path / "model.ckpt-7")] * 3
        assert [call.args[0][-1] for call in read.call_args_list] == ["7", "5", "7"]


def test_a_checkpoint_that_a_save_was_broken_off_for_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved again has no index for a moment: who looks then reads that the job brings it in."""
    run, replace = Training(tmp_path), os.replace
    run.save(1)
    run.save(2)

    def interrupted(source: Any, target: Any) -> None:
        if str(target) == str(tmp_path / "model.ckpt-2.index"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    run.checkpoints._at_rest.clear()
    monkeypatch.setattr(os, "replace", interrupted)
    with contextlib.suppress(StorageError, OSError):
        run.save(2)
    monkeypatch.undo()
    caplog.clear()
    assert select_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-1")
    assert f"{tmp_path / 'model.ckpt-2'} is saved but not yet published" in caplog.text
    assert Training(tmp_path).resume() == 2
    assert directory.sealed(str(tmp_path)) == []
