"""``tfps launch``: a whole cluster on this machine, from one command to its report."""

import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest
from helpers import (
    MNIST,
    POWERS,
    TFPS,
    environment,
    run_tfps,
    summary,
)

LONG = ("launch", "--model=linear", "--num_ps=1", "--num_workers=2", "--max_steps=1000000", "--steps_to_validate=20")


def _accuracy(model_dir: Path) -> float:
    return float(summary(model_dir)["eval"]["accuracy"])


def test_mnist_on_the_digits_that_the_package_carries(tmp_path: Path) -> None:
    """With no data at hand, 2 PS and 4 workers learn the embedded digits, all exit 0, and the report says it all."""
    ended = run_tfps(
        "launch",
        "--model=mnist",
        "--num_ps=2",
        "--num_workers=4",
        "--max_steps=400",
        "--issync=1",
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [model_dir] = (tmp_path / "runs").iterdir()
    told = summary(model_dir)
    assert _accuracy(model_dir) >= 0.85
    assert told["global_step"] == 400
    assert told["examples_per_sec"] > 0
    assert told["pace"]["steps_per_run"] >= told["pace"]["runs_in_flight"] >= 1
    assert told["gradients_dropped"] == 0
    assert {task: of["exit_code"] for task, of in told["tasks"].items()} == dict.fromkeys(
        ["ps/0", "ps/1", "worker/0", "worker/1", "worker/2", "worker/3"], 0
    )
    report = ended.stdout[ended.stdout.index("\ndone: ") :]
    assert "done: step 400 after" in report
    assert f"eval accuracy  {_accuracy(model_dir):.4g}" in report
    assert f"{told['checkpoint']}" in report
    assert re.search(r"^worker/3 \| step=1?\d* ", ended.stdout, re.MULTILINE)
    assert "E0000" not in ended.stdout + ended.stderr
    assert "absl::InitializeLog" in (model_dir / "logs" / "launch.log").read_text()


@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's files are not beside the checkout")
@pytest.mark.parametrize("issync", ["0", "1"])
def test_real_mnist_reaches_90_percent_in_400_steps(tmp_path: Path, issync: str) -> None:
    """1 PS and 2 workers reach 0.90 on MNIST's last 2,000 images within 400 global steps of batch 128."""
    ended = run_tfps(
        *("launch", "--model=mnist", f"--data_dir={MNIST}", "--num_ps=1", "--num_workers=2", "--batch_size=128"),
        *("--max_steps=400", f"--issync={issync}", f"--model_dir={tmp_path}"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert _accuracy(tmp_path) >= 0.90


def test_a_mistake_in_the_users_model_shows_the_users_line_once(tmp_path: Path) -> None:
    """A model that fails as it is built is exit 2, with the user's own line, told once and without a traceback."""
    model = tmp_path / "mine.py"
    model.write_text(POWERS.replace("loss = weight *", "loss = weihgt *"))
    ended = run_tfps("launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}")
    assert ended.returncode == 2
    line = 1 + model.read_text().splitlines().index('    loss = weihgt * features["x"]')
    assert f"{model}, line {line}: NameError" in ended.stderr
    assert 'loss = weihgt * features["x"]' in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert summary(tmp_path / "m")["exit_code"] == 2


def test_a_diverging_job_ends_with_66(tmp_path: Path) -> None:
    """A loss that becomes NaN or Inf ends the job with 66 and names the remedy; no checkpoint of it is left."""
    ended = run_tfps("launch", "--learning_rate=1e30", "--max_steps=1000", f"--model_dir={tmp_path}")
    assert ended.returncode == 66, ended.stdout + ended.stderr
    assert "--learning_rate" in ended.stderr
    assert list(tmp_path.glob("model.ckpt-*")) == []


def test_a_job_of_one_step_ends_with_exactly_one_update(tmp_path: Path) -> None:
    """Two workers and one step: one update in async, one in sync, and every task exits 0."""
    model = tmp_path / "powers.py"
    model.write_text(POWERS)
    for mode in ("async", "sync"):
        ended = run_tfps(
            "launch", f"--model={model}", f"--mode={mode}", "--max_steps=1", f"--model_dir={tmp_path / mode}"
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        told = summary(tmp_path / mode)
        assert told["global_step"] == 1
        assert {of["exit_code"] for of in told["tasks"].values()} == {0}


def test_an_ambient_tf_config_is_not_the_launched_tasks(tmp_path: Path) -> None:
    """``launch`` makes its own cluster: a TF_CONFIG in the environment neither joins nor breaks it."""
    ended = run_tfps("launch", "--max_steps=5", f"--model_dir={tmp_path}", TF_CONFIG='{"cluster": {"ps": ["h:1"]}}')
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_on_a_terminal_there_is_a_live_view(tmp_path: Path) -> None:
    """On a terminal the steps, the loss, the speed, the time left and every task's state are drawn in place."""
    primary, secondary = pty.openpty()
    command = [*TFPS, "launch", "--max_steps=3000", f"--model_dir={tmp_path}"]
    env = environment(TERM="xterm-256color", COLUMNS="100", LINES="40")
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env=env) as process:
        os.close(secondary)
        drawn = _read_all(primary, 60)
        assert process.wait(10) == 0, drawn
    for shown in ("/3000 steps", "left", "loss 0.", "examples/s", "worker/1", "training", "done: step 3,000 after"):
        assert shown in drawn
    assert "worker/0  | step=" not in drawn


def _read_all(fd: int, secs: float) -> str:
    """Return all that is written to a terminal until it is closed."""
    data, deadline = b"", time.monotonic() + secs
    while time.monotonic() < deadline:
        try:
            data += os.read(fd, 65536)
        except OSError:
            break
    os.close(fd)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
