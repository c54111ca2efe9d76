"""A task's process, between its fork and its first own instruction: a signal that comes then is not lost."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import POWERS

from tfps.cluster.ports import held_ports
from tfps.config.launch_protocol import HAS_RECORD
from tfps.launchers.local.fork_server import ForkServer
from tfps.launchers.local.task_process import task_main

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Held:
    """Holds the process that receives it, before it has set itself up, until somebody opens a FIFO for writing."""

    def __init__(self, fifo: str) -> None:
        self._fifo = fifo

    def __reduce__(self) -> tuple[Callable[[str, int], int], tuple[str, int]]:
        return os.open, (self._fifo, os.O_RDONLY)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A fork server that has imported TensorFlow, of a launcher that a task in a step of Slurm has started."""
    for name, value in {HAS_RECORD: "1", "TF_CONFIG": "{", "SLURM_STEP_NUM_TASKS": "5", "SLURM_JOB_ID": "8"}.items():
        monkeypatch.setenv(name, value)
    made = ForkServer(tmp_path / "launch.log")
    made.start()
    try:
        assert made.is_ready(200)
        yield made
    finally:
        made.end()


def code_of(server: ForkServer, argv: list[str], number: int = 0) -> int | None:
    """Return the exit code of a task that gets a signal just after its fork."""
    context: Any = server.context
    ours, theirs = context.Pipe()
    life, sign = context.Pipe(duplex=False)
    process = context.Process(target=task_main, args=(argv, theirs, sign, {}), daemon=True)
    with tempfile.TemporaryDirectory() as directory:
        fifo = f"{directory}/fifo"
        os.mkfifo(fifo)
        process.held = _Held(fifo)  # it is sent with the process
        process.start()
        os.kill(process.pid, number)
        released = os.open(fifo, os.O_RDWR)
        process.join(100)
        os.close(released)
    for end in (ours, theirs, life, sign):
        end.close()
    code: int | None = process.exitcode
    return code


def test_a_signal_before_a_task_has_set_itself_up_is_not_lost(server: ForkServer) -> None:
    """SIGTERM ends the task soon; SIGINT and SIGHUP, which come for the whole group, are the launcher's to handle."""
    codes = {number: code_of(server, ["--no_such_flag=1"], number) for number in SIGNALS}
    assert codes == {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 2, signal.SIGHUP: 2}


def test_tasks_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    """NumPy's generator is in the fork server, and a fork copies its state; without a seed, each task has its own."""
    drawn, model = tmp_path / "drawn", tmp_path / "draws.py"
    draws = f"open({str(drawn)!r}, 'a').write(f'{{numpy.random.random()}} {{random.random()}} ')"
    model.write_text(
        f"import os, sys\nassert 'numpy' in sys.modules\nimport numpy, random\n{draws}\nos._exit(7)\n{POWERS}"
    )
    with held_ports(2) as (ps, worker):
        hosts = [f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{worker}"]
        me = ["--job_name=worker", "--task_index=0", f"--model={model}", f"--model_dir={tmp_path / 'm'}"]
        assert [code_of(server, [*hosts, *me]) for _ in range(2)] == [7, 7]
    numbers = drawn.read_text().split()
    assert len(numbers) == len(set(numbers)) == 4


def test_what_a_model_and_its_processes_find(server: ForkServer, tmp_path: Path) -> None:
    """No signal is blocked, or SIGTERM would not end such a process; Slurm's variables are there as in any task."""
    reported, model = tmp_path / "reported", tmp_path / "starts.py"
    command = ["grep", "SigBlk", "/proc/self/status"]
    is_alone = f"assert not {{{HAS_RECORD!r}, 'TF_CONFIG'}} & set(os.environ)"  # what that task got is not for this one
    is_there = "assert os.environ['SLURM_JOB_ID'] == '8'"
    starts = f"subprocess.run({command}, stdout=open({str(reported)!r}, 'w'))"
    model.write_text(f"import os, subprocess\n{is_alone}\n{is_there}\n{starts}\nos._exit(7)\n{POWERS}")
    with held_ports(2) as (ps, worker):
        hosts = [f"--ps_hosts=127.0.0.1:{ps}", f"--worker_hosts=127.0.0.1:{worker}"]
        me = ["--job_name=worker", "--task_index=0", f"--model={model}", f"--model_dir={tmp_path / 'm'}"]
        assert code_of(server, [*hosts, *me]) == 7
    assert reported.read_text().split() == ["SigBlk:", "0" * 16]
