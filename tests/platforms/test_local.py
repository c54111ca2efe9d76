"""``tfps launch`` on this machine: the ConvNet learns, on real MNIST and on the digits that the package carries."""

import re
from pathlib import Path

import pytest
from support.processes import MNIST, run_tfps, summary


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
    reported = summary(model_dir)
    assert _accuracy(model_dir) >= 0.85
    assert reported["global_step"] == 400
    assert reported["examples_per_sec"] > 0
    assert reported["pace"]["steps_per_run"] >= reported["pace"]["runs_in_flight"] >= 1
    assert reported["gradients_dropped"] == 0
    assert {task: of["exit_code"] for task, of in reported["tasks"].items()} == dict.fromkeys(
        ["ps/0", "ps/1", "worker/0", "worker/1", "worker/2", "worker/3"], 0
    )
    report = ended.stdout[ended.stdout.index("\ndone: ") :]
    assert "done: step 400 after" in report
    assert f"eval accuracy  {_accuracy(model_dir):.4g}" in report
    assert f"{reported['checkpoint']}" in report
    assert re.search(r"^worker/3 \| training", ended.stdout, re.MULTILINE)
    assert re.search(r"^job      \| step=1?\d* ", ended.stdout, re.MULTILINE)
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
