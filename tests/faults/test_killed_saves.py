"""Saves that are killed at every moment."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Training, damage
from support.processes import environment

from tfps.runtime.checkpoint.directory import list_checkpoints

# Saves as of a step in a process of its own, which is killed before its n-th change to the disk, for every n until it
# gets through; then says what a new chief makes of what each has left. The processes are forked before any session is.
KILLED = """
import json, os, shutil, signal, sys, traceback
from pathlib import Path
from tfps.runtime.process import tensorflow_import
tensorflow_import.load_v1()
import tensorflow.compat.v1 as tf
from tfps.runtime.checkpoint.manager import CheckpointManager

start, last = Path(sys.argv[1]), int(sys.argv[2])
work = start.parent / "work"

def build():  # after a fork: TensorFlow starts threads for a graph, and a fork has none of them
    global global_step, weight, init, checkpoints
    tf.Graph().as_default().__enter__()
    global_step = tf.train.get_or_create_global_step()
    weight = tf.get_variable("weight", [1000], initializer=tf.zeros_initializer())
    init = tf.global_variables_initializer()
    checkpoints = CheckpointManager(str(work), 60)

def save(session, step, checkpoints):
    weight.load([step] * 1000, session)
    global_step.load(step, session)
    checkpoints.save(session, step)

def killed_before(nth):
    calls = []
    def dying(name, real):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == nth:
                (start.parent / f"{nth}.call").write_text(name)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    build()
    with tf.Session() as session:
        session.run(init)
        checkpoints.restore_latest(session)
        checkpoints._consistent.clear()  # so that it saves that step again
        for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
            setattr(os, name, dying(name, getattr(os, name)))
        save(session, last, checkpoints)

def apart(act):
    pid = os.fork()
    if not pid:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]

statuses = []
while not statuses or statuses[-1] == signal.SIGKILL:
    shutil.copytree(start, work)
    statuses.append(apart(lambda: killed_before(len(statuses) + 1)))
    work.rename(start.parent / str(len(statuses)))

build()
with tf.Session() as session:
    for nth, status in enumerate(statuses, 1):
        left = start.parent / str(nth)
        session.run(init)
        checkpoints = CheckpointManager(str(left), 60)
        path = checkpoints.restore_latest(session)
        found, values = session.run([global_step, weight])
        assert (values == found).all()
        seen = tf.train.latest_checkpoint(str(left))
        call = start.parent / f"{nth}.call"
        found_out = {"status": status, "call": call.read_text() if call.exists() else None}
        found_out["resumed"], found_out["step"] = path and int(path.rpartition("-")[2]), int(found)
        found_out["seen"] = int(tf.train.load_variable(seen, "global_step")) if seen else None
        found_out["left"] = sorted(path.name for path in left.iterdir())
        save(session, last + 1, checkpoints)
        found_out["after"] = sorted(path.name for path in left.iterdir())
        print(json.dumps(found_out))
"""


def killed_at_each_phase(start: Path, step: int) -> list[dict[str, Any]]:
    """Return what was found after a save was killed, once for each phase."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(start), str(step)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def names_of(*steps: int) -> list[str]:
    """Return the names of the files that a directory with these checkpoints holds."""
    files = ("data-00000-of-00001", "index", "manifest.json")
    return sorted(["checkpoint", *(f"model.ckpt-{step}.{file}" for step in steps for file in files)])


@pytest.mark.parametrize(
    ("saved", "damaged", "whole"),
    [([], None, None), ([1, 2, 3, 4, 5], None, 5), ([4, 6], 6, 4), ([4, 6], None, 6)],
    ids=["first", "full", "damaged", "again"],
)
def test_a_kill_at_any_phase_leaves_the_newest_whole_one(
    tmp_path: Path, saved: list[int], damaged: int | None, whole: int | None
) -> None:
    """Killed before any of its changes to the disk, a save of step 6 leaves it whole, or not there.

    It is there once all of it is on the disk. The newest whole one is always restored, plain TensorFlow sees one that
    is whole, and what the killed save has left is gone after the next. So it is with the first checkpoint, where an old
    one has to go, and where one of the same step is in place, damaged or whole.
    """
    start = tmp_path / "start"
    start.mkdir()
    run = Training(start, (1000,))
    for step in saved:
        run.weight.load([step] * 1000, run.session)
        run.save(step)
    if damaged:
        damage(start / "model.ckpt-6.data-00000-of-00001", "flipped")
    found = killed_at_each_phase(start, 6)
    assert [one["status"] for one in found] == [signal.SIGKILL] * (len(found) - 1) + [0]
    calls = [one["call"] for one in found[:-1]]
    assert set(calls) >= {"mkdir", "fsync", "replace", "rmdir"}
    assert calls.count("fsync") == 6  # data, index, manifest, state; the directory twice
    on_disk = [nth for nth, call in enumerate(calls) if call == "fsync"][3]
    through = 0 if whole == 6 else on_disk + 2  # then the state file gets its name
    assert [one["resumed"] for one in found] == [whole] * through + [6] * (len(found) - through)
    for one in found:
        assert one["step"] == (one["resumed"] or 0)
        assert one["seen"] in (whole, one["resumed"]) or 6 in saved
        assert [name for name in one["left"] if name.startswith(".")] == []
        anew = [step for step in saved if step != 6] + [6] * (one["resumed"] == 6) + [7]
        assert one["after"] in (names_of(*anew[-5:]), names_of(*saved, 7) if 6 in saved else None)


# Saves 256 MB, and is killed as TensorFlow writes them.
KILLED_IN_WRITING = """
import os, signal, sys, threading, time
from pathlib import Path
from tfps.runtime.process import tensorflow_import
tensorflow_import.load_v1()
import tensorflow.compat.v1 as tf
from tfps.runtime.checkpoint.manager import CheckpointManager

def watch():
    while True:
        for file in Path(sys.argv[1]).glob(".saving-*/**/*.data-*"):
            if file.stat().st_size > 2**20:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)

with tf.Graph().as_default(), tf.Session() as session:
    tf.train.get_or_create_global_step()
    tf.get_variable("weight", [2**26], initializer=tf.ones_initializer())
    session.run(tf.global_variables_initializer())
    threading.Thread(target=watch, daemon=True).start()
    CheckpointManager(sys.argv[1], 60).save(session, 0)
"""


def test_a_kill_while_tensorflow_writes_leaves_nothing(tmp_path: Path) -> None:
    """Killed in the midst of the data, a save has left no checkpoint; what it has left is gone at the next start."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_IN_WRITING, str(tmp_path)], env=environment(), timeout=600, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    [staged] = tmp_path.iterdir()
    assert staged.name.startswith(".saving-")
    assert [path.suffix for path in staged.iterdir() if path.suffix == ".index"] == []
    assert list_checkpoints(str(tmp_path)) == []
    assert Training(tmp_path).resume() is None
    assert list(tmp_path.iterdir()) == []
