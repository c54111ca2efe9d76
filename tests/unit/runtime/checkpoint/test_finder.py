"""Which checkpoint of a directory is used, and what is said of the others."""

import contextlib
import errno
import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf
from support.checkpoints import FILES, HOW, Training, damage, damage_reports, said, spoil, unreadable
from support.cluster import LINEAR, job, train, variables_of, wait_until
from support.processes import run_tfps, summary

from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, StorageError
from tfps.models import loader
from tfps.runtime.checkpoint import directory, manifest
from tfps.runtime.checkpoint.finder import Finder, newest_by_sizes, select_checkpoint
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results import evaluation
from tfps.storage import open_file

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


def test_the_newest_one_is_named_without_reading_its_data(tmp_path: Path) -> None:
    """What a summary names costs no time, however large it is: files count that have an index and their sizes."""
    assert newest_by_sizes(str(tmp_path)) is newest_by_sizes(None) is None
    run = Training(tmp_path)
    for step in (3, 5, 7, 9):
        run.save(step)
    damage(tmp_path / "model.ckpt-7.data-00000-of-00001", "truncated")
    (tmp_path / "model.ckpt-9.index").unlink()
    with mock.patch.object(manifest, "open_file", wraps=open_file) as opened:
        assert newest_by_sizes(str(tmp_path)) == str(tmp_path / "model.ckpt-5")
    assert [call.args[0].name for call in opened.call_args_list] == ["model.ckpt-5.index"]


def test_a_checkpoint_is_read_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who looks again and again for the newest one reads each once; a step that is saved anew is looked at anew."""
    run = Training(tmp_path)
    run.save(5)
    run.save(7)
    damage(tmp_path / "model.ckpt-7.index", "flipped")
    finder = Finder(str(tmp_path))
    with mock.patch("tfps.runtime.checkpoint.finder.damage", side_effect=manifest.damage) as read:
        assert [finder.newest() for _ in range(3)] == [str(tmp_path / "model.ckpt-5")] * 3
        assert [call.args[0][-1] for call in read.call_args_list] == ["7", "5"]
        assert len(damage_reports(caplog)) == 1
        run = Training(tmp_path)
        assert run.resume() == 5
        run.save(7)
        assert [finder.newest() for _ in range(3)] == [str(tmp_path / "model.ckpt-7")] * 3
        assert [call.args[0][-1] for call in read.call_args_list] == ["7", "5", "7"]


def test_a_checkpoint_that_cannot_be_read_now_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An outage that lasts longer than a reader's patience is reported once, and over when it is over."""
    run = Training(tmp_path)
    run.save(5)
    run.save(7)
    finder = Finder(str(tmp_path))
    with unreadable(tmp_path / "model.ckpt-7.index", times=10):
        assert [finder.newest() for _ in range(2)] == [str(tmp_path / "model.ckpt-5")] * 2
        assert [finder.may_read_more(secs) for secs in (1000, 0)] == [True, False]
        assert finder.newest() == str(tmp_path / "model.ckpt-7")
    assert finder.damaged == {}
    assert not finder.may_read_more(1000)
    assert len(damage_reports(caplog)) == 1


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

    run.checkpoints._consistent.clear()
    monkeypatch.setattr(os, "replace", interrupted)
    with contextlib.suppress(StorageError, OSError):
        run.save(2)
    monkeypatch.undo()
    caplog.clear()
    assert select_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-1")
    assert f"{tmp_path / 'model.ckpt-2'} is saved but not yet published" in caplog.text
    assert Training(tmp_path).resume() == 2
    assert directory.sealed(str(tmp_path)) == []


def files_in(directory: Path) -> dict[str, bytes]:
    """Return what a directory's files hold, by their names."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(("file", "how"), list(itertools.product(FILES, HOW)))
@pytest.mark.parametrize("manifest", [True, False])
def test_the_newest_whole_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str, manifest: bool
) -> None:
    """With any file of the newest checkpoint damaged, the one before is used, and one line names the file.

    So it is with checkpoints of plain TensorFlow, without manifests. The damaged one is left as it is until its step
    is saved anew; then that is whole, and is used.
    """
    run = Training(tmp_path)
    for step in (5, 7):
        run.save(step)
    for path in tmp_path.glob("*.manifest.json" if not manifest else "no-file"):
        path.unlink()
    spoil(tmp_path / f"model.ckpt-7.{file}", how)
    before = files_in(tmp_path)
    run = Training(tmp_path)
    assert run.resume() == 5
    [line] = damage_reports(caplog)
    assert line.startswith(f"checkpoint {tmp_path}/model.ckpt-7 is damaged: ")
    assert f"model.ckpt-7.{file}" in line or (not manifest and "TensorBundle at " in line)
    assert "\n" not in line
    assert files_in(tmp_path) == before
    run.save(6)
    assert Training(tmp_path).resume() == 6
    assert len(damage_reports(caplog)) == 1
    run.weight.load([7, 7, 7, 7], run.session)
    run.save(7)
    run = Training(tmp_path)
    assert run.resume() == 7
    assert run.session.run(run.weight).tolist() == [7, 7, 7, 7]
    assert damage_reports(caplog) == []
    assert problem(str(tmp_path / "model.ckpt-7")) is None


@pytest.mark.parametrize("how", ["truncated", "garbled", "empty"])
def test_a_garbled_manifest_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Nobody can tell whether a checkpoint with a garbled manifest is whole: the one before is used."""
    run = Training(tmp_path)
    for step in (5, 7):
        run.save(step)
    damage(tmp_path / "model.ckpt-7.manifest.json", how)
    assert Training(tmp_path).resume() == 5
    assert [line.partition("damaged: ")[2] for line in damage_reports(caplog)] == [
        f"model.ckpt-7.manifest.json is {'empty' if how == 'empty' else 'garbled'}. Trying the previous one."
    ]


def test_none_whole_is_an_error_that_lists_them(tmp_path: Path) -> None:
    """Where there are checkpoints and none is whole, that is a CheckpointError which names each: never step 0."""
    run = Training(tmp_path)
    for step in (5, 6, 7, 8):
        run.save(step)
    for step, (file, how) in {5: (FILES[0], "missing"), 6: (FILES[1], "missing"), 7: (FILES[1], "flipped")}.items():
        spoil(tmp_path / f"model.ckpt-{step}.{file}", how)
    (tmp_path / "model.ckpt-8.index").unlink()
    (tmp_path / "model.ckpt-8.manifest.json").unlink()
    before = files_in(tmp_path)
    for act in (Training(tmp_path).resume, lambda: select_checkpoint(str(tmp_path))):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint: ") as reported:
            act()
        text = str(reported.value)
        assert re.findall(r"(model\.ckpt-\d) \(", text) == [f"model.ckpt-{step}" for step in (8, 7, 6, 5)]
        assert "model.ckpt-8.index is missing" in text
        assert "\n" not in text
        assert files_in(tmp_path) == before


def test_damage_is_no_fault_of_a_ps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What only reading a checkpoint finds is reported once: the PS, which read it first, are not said to be unable."""
    caplog.set_level("INFO", "tfps")
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    (tmp_path / "model.ckpt-20.manifest.json").unlink()
    damage(tmp_path / "model.ckpt-20.data-00000-of-00001", "flipped")
    train(LINEAR, num_workers=1, max_steps=30, model_dir=str(tmp_path))
    assert summary(tmp_path)["resumed_from_step"] == 10
    assert "a PS cannot" not in caplog.text
    assert len(damage_reports(caplog)) == 1


def test_a_job_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job passes a damaged checkpoint over, and says so; with none whole, it ends with 65 and trains nothing."""
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    damage(tmp_path / "model.ckpt-20.data-00000-of-00001", "flipped")
    train(LINEAR, num_workers=1, mode="sync", max_steps=20, model_dir=str(tmp_path))
    assert len(damage_reports(caplog)) == 1
    reported = summary(tmp_path)
    assert (reported["resumed_from_step"], reported["resumed_from"]) == (10, str(tmp_path / "model.ckpt-10"))
    assert reported["checkpoint"] == str(tmp_path / "model.ckpt-20")
    assert variables_of(tmp_path) == {"weight": -20, "global_step": 20}
    for step in (10, 20):
        damage(tmp_path / f"model.ckpt-{step}.index", "garbled")
    with job(LINEAR, num_workers=1, max_steps=30, model_dir=str(tmp_path)) as running:
        wait_until(lambda: "worker/0" in running.ended)
    assert isinstance(running.ended["worker/0"], CheckpointError)
    reported = summary(tmp_path)
    assert (reported["exit_code"], reported["global_step"], reported["checkpoint"]) == (65, 0, None)


EVALUATED = """
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    return tf.data.Dataset.from_tensors(({"x": 1.0}, 0.0))

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = weight * features["x"]
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


def test_tfps_eval_says_what_it_passes_over(tmp_path: Path) -> None:
    """``tfps eval`` measures the newest whole checkpoint; the line on the damaged one is not in its output."""
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path / "m"))
    spoil(tmp_path / "m" / "model.ckpt-20.data-00000-of-00001", "missing")
    (tmp_path / "mine.py").write_text(EVALUATED)
    ended = run_tfps("eval", f"--model_dir={tmp_path}/m", f"--model={tmp_path}/mine.py")
    assert (ended.returncode, ended.stdout) == (0, "step=10 loss=-10\n"), ended.stderr
    assert ended.stderr.startswith(f"checkpoint {tmp_path}/m/model.ckpt-20 is damaged: model.ckpt-20.data-")
    assert ended.stderr.count("\n") == 1


def test_the_evaluator_measures_what_it_could_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint of a job that has ended can be read again after a while: the evaluator waits for it."""
    caplog.set_level(logging.INFO, "tfps")
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    (tmp_path / "mine.py").write_text(EVALUATED)
    config = JobConfig(model=str(tmp_path / "mine.py"), model_dir=str(tmp_path), max_steps=20)
    with unreadable(tmp_path / "model.ckpt-20.index", times=10):
        evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), loader.load(config.model), StopRequest())
    assert "step=20 loss=-20" in caplog.messages


def test_the_evaluator_passes_damage_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The evaluator measures the newest whole checkpoint of a job that has ended, and ends."""
    caplog.set_level(logging.INFO, "tfps")
    for step in (10, 20):
        train(LINEAR, num_workers=1, max_steps=step, model_dir=str(tmp_path))
    damage(tmp_path / "model.ckpt-20.data-00000-of-00001", "flipped")
    (tmp_path / "mine.py").write_text(EVALUATED)
    config = JobConfig(model=str(tmp_path / "mine.py"), model_dir=str(tmp_path), max_steps=20)
    evaluation.follow(config, Cluster(("ps:1",), ("worker:1",)), loader.load(config.model), StopRequest())
    assert "step=10 loss=-10" in caplog.messages
    assert len(damage_reports(caplog)) == 1
