"""What a model prints is not taken for what its task says of itself, and hides nothing of that."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
from support.processes import run_tfps, slow, summary

from tfps.runtime.process.model_output import Errors, OwnLines, Printed

LAUNCH = ("launch", "--num_ps=1", "--num_workers=1", "--max_steps=5", "--steps_to_validate=1")


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["my own\n"], "my own\n"),
        (["done\n"], "model: done\n"),
        (["done", " ", "with that", "\n"], "model: done with that\n"),
        (["step=", "5 loss=1\n"], "step=5 loss=1\n"),
        (["step=7 loss=1\nstep=8\n"], "model: step=7 loss=1\nmodel: step=8\n"),
        (["I am ", "done\n"], "I am done\n"),
        (["donetoo\n", " done\n", "steps=3\n", "step=x\n"], "donetoo\n done\nsteps=3\nstep=x\n"),
        (["error: no such thing\n"], "model: error: no such thing\n"),
        (["restarted after SIGKILL (1 of 3)\n"], "model: restarted after SIGKILL (1 of 3)\n"),
        (["", "\n", "done\n"], "\nmodel: done\n"),
    ],
)
def test_a_line_that_begins_as_a_tasks_own_is_marked(texts: list[str], shown: str) -> None:
    """However many writes a line takes; nothing else is changed."""
    stream = io.StringIO()
    printed = Printed(stream)
    assert [printed.write(text) for text in texts] == [len(text) for text in texts]
    assert stream.getvalue() == shown


def test_a_tasks_own_lines_begin_at_the_left() -> None:
    """What the model has begun is ended first: its last line, or a bar that it draws over and over."""
    stream = io.StringIO()
    printed = Printed(stream)
    own, record = OwnLines(printed), logging.makeLogRecord({"msg": "step=5 loss=1"})
    for text in ("half a line", "\r50%\r", "a line\n"):
        printed.write(text)
        own.emit(record)
    assert stream.getvalue() == "half a line\nstep=5 loss=1\n\r50%\r\nstep=5 loss=1\na line\nstep=5 loss=1\n"
    printed.write("half")
    Errors(stream, printed).write("error: lost ps/0\n")
    assert stream.getvalue().endswith("\nhalf\nerror: lost ps/0\n")


TALKATIVE = (
    slow(0.3).replace("        return x", "        talk()\n        return x")
    + """
import logging.config
import sys

def talk():
    for line in ("done", "stopped by nobody", "step=900 loss=-1 examples/s=1e9", "error: all is lost"):
        print(line)
        print(line, file=sys.stderr)
    print("restarted after SIGKILL (1 of 3)")
    print("half a line", end="")

talk()
logging.config.dictConfig({"version": 1})
"""
)


def test_a_talkative_model_changes_nothing_of_the_report(tmp_path: Path) -> None:
    """Its states, steps, errors and restarts are not the task's, nor does it silence that, or run into its lines."""
    model = tmp_path / "talk.py"
    model.write_text(TALKATIVE)
    ended = run_tfps(*LAUNCH, f"--model={model}", f"--model_dir={tmp_path / 'm'}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout.splitlines()
    assert "worker/0 | model: done" in said
    assert "worker/0 | half a line" in said
    assert re.search(r"^job      \| step=\d loss=", ended.stdout, re.MULTILINE)
    assert not re.search(r"^error|\| error:", ended.stdout + ended.stderr, re.MULTILINE)
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"], reported["recovery_secs"]) == ("done", 5, 0)
    assert "restarted_after" not in json.dumps(reported)
    assert "step 900" not in ended.stdout
