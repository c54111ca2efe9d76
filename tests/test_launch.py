"""``tfps launch``: a whole cluster on this machine, from one command to its report."""

import os
import pty
import re
import subprocess
import time
from pathlib import Path

from helpers import POWERS, REPO, TFPS, environment, run_tfps, summary


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


def test_a_model_dir_that_is_a_file_is_74(tmp_path: Path) -> None:
    """``--model_dir`` that cannot be a directory is told as such, and nothing is started."""
    (tmp_path / "file").touch()
    for given in (tmp_path / "file", tmp_path / ("x" * 300)):
        ended = run_tfps("launch", f"--model_dir={given}")
        assert (ended.returncode, ended.stdout) == (74, "")
        assert ended.stderr.startswith(f"error: --model_dir: {given}")
        assert ended.stderr.count("\n") == 1


def test_a_tensorflow_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    """What TensorFlow's own import says is the error, whatever kind it is."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly.')")
    ended = run_tfps("launch", f"--model_dir={tmp_path}/m", PYTHONPATH=f"{tmp_path}:{REPO}")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    told = "TensorFlow cannot be imported: TypeError: Descriptors cannot be created directly"
    assert ended.stderr == f"error: {told} (all of it is in {tmp_path}/m/logs/launch.log).\n"


def test_a_diverging_job_ends_with_66(tmp_path: Path) -> None:
    """A loss that becomes NaN or Inf ends the job with 66 and names the remedy; no checkpoint of it is left."""
    ended = run_tfps("launch", "--learning_rate=1e30", "--max_steps=1000", f"--model_dir={tmp_path}")
    assert ended.returncode == 66, ended.stdout + ended.stderr
    assert "--learning_rate" in ended.stderr
    assert list(tmp_path.glob("model.ckpt-*")) == []


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
