"""Claims about ``scripts/compare_modes``: what it runs, how it reads a run, and what its page says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import curves
import naps
import numpy as np
import page
import pytest
import tensorflow.compat.v1 as tf
import trials
from candidates import Candidate, candidates
from support.processes import REPO, environment
from trials import SLOWED, UNDISTURBED, Line, Setting, Traffic, Trial

import tfps
from tfps.modes.registry import MODES

SCRIPT = REPO / "scripts" / "compare" / "compare.py"
SETTING = Setting(num_workers=4, batch_size=10, batches=100)
BACKUP = Candidate("sync", {"backup_workers": 1})
LOCAL = Candidate("local", {"sync_every": 20})

LOG = """2026-11-27 18:55:14,543 training: mode sync, 4 workers, 1 ps
2026-11-27 18:55:14,845 step=1 loss=2.303
2026-11-27 18:55:15,345 step=20 loss=0.5 examples/s=1416
2026-11-27 18:55:16,653 step=20 eval/loss=0.2074 eval/accuracy=0.948
"""
PLAN = """direction           tensors  bytes  with --wire=plain  bytes
pull, ps to worker        2  1,000                  5  7,856
push, worker to ps        1     50                  5  7,844
pull, ps to worker, a round  5  300                 5  9,999
push, worker to ps, a round  5    4                 5  9,999
"""


def lines(workers: int, steps: int, secs: float) -> list[list[Line]]:
    """Return progress of workers that begin a second apart and end together, every tenth step."""
    return [
        [Line(float(worker), 0, 2.0), *(Line(10 + secs * step / steps, step, 1.0) for step in range(10, steps + 1, 10))]
        for worker in range(workers)
    ]


def summary_of(step: int, **more: Any) -> dict[str, Any]:
    """Return the part of a summary that is read."""
    return {"status": "done", "global_step": step, "gradients_dropped": None, "eval": {"accuracy": 0.5}, **more}


def test_every_mode_takes_part_with_flags_that_it_has() -> None:
    """Also one that is added to the registry later."""
    made = candidates(list(MODES.builtin))
    assert {one.mode for one in made} == set(MODES.builtin)
    assert {"sync", "sync --backup_workers=1", "local --sync_every=20"} <= {one.name for one in made}
    assert all(set(one.flags) <= set(MODES.load(one.mode).flags) for one in made)


def test_all_modes_train_on_as_many_batches() -> None:
    """A global step of sync has a batch of each worker, less those that it does not wait for."""
    made = {one.name: one.max_steps(1_600, 4) for one in candidates(list(MODES.builtin))}
    expected = {"async": 1_600, "sync": 400, "sync --backup_workers=1": 534, "local --sync_every=20": 400}
    assert {name: made[name] for name in expected} == expected


def test_progress_lines_are_read_without_those_of_evaluation() -> None:
    """The loss of an evaluation is no training loss."""
    found = trials.parse_log(LOG)
    assert [(line.step, line.loss) for line in found] == [(1, 2.303), (20, 0.5)]
    assert found[1].time - found[0].time == pytest.approx(0.5, abs=1e-3)


def test_the_bytes_of_a_step_and_of_a_round_are_read_apart() -> None:
    """Those of the wire that is used, not of ``--wire=plain``."""
    assert trials.traffic_of(PLAN) == Traffic(step=1_050, round=304)
    ring = "send, worker to next    7  11,776\npull, chief to worker   1       0\npush, worker to chief   1       8\n"
    assert trials.traffic_of(ring) == Traffic(step=11_784, round=0)
    gossip = "".join(f"send, worker to worker/{index}  4  7,872\n" for index in (0, 2))
    gossip += "push, worker to chief, a mean  10  15\n"
    assert trials.traffic_of(gossip) == Traffic(step=15_744, round=15)


def test_bytes_are_of_every_step_and_every_round() -> None:
    """Also of late gradients, and of a last round that is shorter."""
    late = Trial(BACKUP.name, UNDISTURBED, 1, batches=30, dropped=7)
    assert trials.sent(late, BACKUP, SETTING, Traffic(100, 0), 10) == 3_700
    rounds = Trial(LOCAL.name, UNDISTURBED, 1, batches=100)
    assert trials.sent(rounds, LOCAL, SETTING, Traffic(0, 100), 25) == 2 * 4 * 100
    gossip = Candidate("gossip", {"topology": "ring"})
    assert trials.sent(rounds, gossip, SETTING, Traffic(1, 100), 101) == 100 + (1 + 2) * 4 * 100


def test_a_rate_counts_from_the_first_step_of_the_last_worker() -> None:
    """What others did before that is not in it."""
    trial = Trial(BACKUP.name, UNDISTURBED, 1)
    told = lines(4, 100, 20.0)
    told[3][0] = Line(11.0, 5, 2.0)  # when the others are at steps 10 (second 12) and 0 (second 2)
    trials.measure(trial, BACKUP, SETTING, summary_of(100, gradients_dropped=2), told)
    assert trial.problem == ""
    assert trial.batches == 300
    assert trial.seconds == pytest.approx(19.0)
    assert trial.rate == pytest.approx((100 - 5) * 3 * 10 / 19)
    assert (trial.accuracy, trial.dropped) == (0.5, 2)


def test_a_curve_is_of_means_in_the_order_of_time() -> None:
    """In batches of all workers; what was before the beginning is at 0."""
    merged = [Line(float(index), index, float(index)) for index in range(16)]
    assert trials.curve(merged, 6.0, 4) == [(0.0, 14.0, 3.5), (5.5, 46.0, 11.5)]


@pytest.mark.parametrize(
    ("summary", "workers"), [(summary_of(100, status="error"), 4), (summary_of(100), 3)], ids=["failed", "one missing"]
)
def test_a_run_that_is_not_whole_does_not_count(summary: dict[str, Any], workers: int) -> None:
    """It has a problem, and no figure."""
    trial = Trial("async", UNDISTURBED, 1)
    trials.measure(trial, Candidate("async", {}), SETTING, summary, lines(workers, 100, 5.0))
    assert trial.problem
    assert trial.rate == 0


def test_only_the_last_worker_is_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only in that case."""
    naps_of = {}
    for case in (UNDISTURBED, SLOWED):
        for name, value in trials.environment(SETTING, case).items():
            monkeypatch.setenv(name, value)
        naps_of[case] = [naps.nap_secs(worker) for worker in range(4)]
    assert naps_of == {UNDISTURBED: [0.02] * 4, SLOWED: [0.02] * 3 + [0.1]}


def test_a_nap_leaves_the_batch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels keep their values, type and shape; a batch comes after the nap."""
    slept: list[float] = []
    monkeypatch.setattr(naps, "time", SimpleNamespace(sleep=slept.append))  # other threads sleep, too
    for name, value in trials.environment(SETTING, SLOWED).items():
        monkeypatch.setenv(name, value)
    params = {"data_dir": "", "batch_size": 5, "seed": 1}
    context = tf.distribute.InputContext(4, 3)
    with tf.Graph().as_default(), tf.Session() as session:
        ours, plain = (
            tf.data.make_initializable_iterator(made(tfps.ModeKeys.TRAIN, params, context))
            for made in (naps.input_fn, naps.mnist.input_fn)
        )
        session.run([ours.initializer, plain.initializer])
        (_, labels), (_, expected) = ours.get_next(), plain.get_next()
        assert (labels.dtype, labels.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(*session.run([labels, expected]))
    assert slept[:1] == [0.1]


def some_trials() -> list[Trial]:
    """Return runs of two modes, of which one waits, and of one that failed."""
    point = [(1.0, 10.0, 0.5)]
    return [
        Trial("async", UNDISTURBED, 1, 100, 1.0, 1_000.0, 0.95, 8_000, 0, point),
        Trial("async", SLOWED, 1, 100, 1.0, 800.0, 0.94, 8_000, 0, point),
        Trial("async", UNDISTURBED, 1, 10, 0.0, 0.0, 0.5, 800, 0, point),
        Trial("sync", UNDISTURBED, 1, 100, 1.0, 900.0, 0.96, 9_000, 0, point),
        Trial("sync", SLOWED, 1, 100, 5.0, 180.0, 0.93, 9_000, 0, point),
        Trial("ssp", UNDISTURBED, 1, problem="not done in time"),
    ]


def test_the_page_says_who_goes_on_without_the_slow_worker() -> None:
    """By the rates of whole runs; a run that failed gives no figure and no claim."""
    facts = {"when": "2026-01-01", "load": 0.1, "cores": 2, "machine": "x86_64", "tensorflow": "2"}
    text = page.page(some_trials(), SETTING, facts)
    assert "| `async` | 1,000 | 800 | 0.80 | 0.950 | 0.940 |" in text
    assert "| `sync` | 900 | 180 | 0.20 | 0.960 | 0.930 |" in text
    assert "| `ssp` | failed | failed | - | failed | failed |" in text
    assert "(keeps 0.7 or more): `async`.\n" in text
    assert "or near it: `sync`.\n" in text
    assert "| `async` | 10 | 0 | 800 | 0.500 |" in text
    assert "other programs" not in text
    assert "other programs" in page.page(some_trials(), SETTING, {**facts, "load": 3.0})


def test_the_picture_shows_whole_runs_and_all_points() -> None:
    """The curves are of the longest runs; accuracy against bytes has the shorter ones, too."""
    told = [trial.to_dict() for trial in some_trials()]
    whole = curves.longest(told, UNDISTURBED)
    assert {name: run["batches"] for name, run in whole.items()} == {"async": 100, "sync": 100}
    assert curves.by_bytes(told) == {"async": [(0.0008, 0.5), (0.008, 0.95)], "sync": [(0.009, 0.96)]}


def run_script(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script; in place of the virtual environment of the plot, a program that writes down what it is given."""
    plot = tmp_path / "plot"
    plot.write_text('#!/bin/sh\necho "$@" >"$3"\n')
    plot.chmod(0o755)
    return subprocess.run(
        [sys.executable, SCRIPT, f"--out={tmp_path}", f"--results={tmp_path}/results.json", *flags],
        env=environment(TFPS_BENCH_PLOT=str(plot), TFPS_BENCH_MNIST=os.devnull),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_a_small_comparison_runs(tmp_path: Path) -> None:
    """Real jobs of sync, the page, and what the picture is drawn from; the page can be written again from that."""
    ended = run_script(tmp_path, "--mode=sync", "--batches=400", "--nap_ms=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert [trial["batches"] for trial in found["trials"]] == [400, 400, 40, 100, 402, 402, 42, 102]
    assert all(trial["sent"] > 0 for trial in found["trials"])
    assert all(trial["curve"] for trial in found["trials"] if trial["batches"] >= 400)
    written = (tmp_path / "mode-comparison.md").read_text()
    assert "the digits of the package" in written
    assert (tmp_path / "mode-comparison.svg").read_text().split()[1] == str(tmp_path / "results.json")
    assert run_script(tmp_path, "--redraw").returncode == 0
    assert (tmp_path / "mode-comparison.md").read_text() == written


def test_help_names_the_flags(tmp_path: Path) -> None:
    """Without a run."""
    shown = run_script(tmp_path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert all(flag in shown.stdout for flag in ("--quick", "--rounds", "--redraw", "--nap_ms"))
    assert [file.name for file in tmp_path.iterdir()] == ["plot"]
