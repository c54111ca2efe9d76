"""Tasks that are lost, or never come, with nobody to start them again: the others say so, and end or go on."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.processes import TFPS, Process, by_hand, environment, load_variable, processes, slow, summary

from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.runtime.coordination import compatibility, failure_notice
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

from tfps.runtime.coordination import duplicate_worker  # noqa: E402


def test_a_missing_task_is_named_and_ends_the_others(tmp_path: Path) -> None:
    """A task that never comes: every other one ends with 171 after ``--start_timeout_secs`` and names it."""
    with held_ports(3) as ports, processes() as started:
        hosts = [f"127.0.0.1:{port}" for port in ports]
        cluster = [f"--ps_hosts={hosts[0]}", f"--worker_hosts={hosts[1]},{hosts[2]}", "--start_timeout_secs=6"]
        for me in (["--job_name=ps"], ["--job_name=worker"]):
            started.append(Process(tmp_path / me[0], *cluster, *me, "--task_index=0"))
        assert [task.wait(100) for task in started] == [171, 171]
        for task in started:
            assert re.search(rf"no answer from .*worker/1 \({hosts[2]}\)", task.output()), task.output()
            assert "Traceback" not in task.output()


def test_a_lost_ps_ends_the_workers_with_170(tmp_path: Path) -> None:
    """A killed PS is a lost peer: each worker says so and ends with 170, in sync too."""
    with by_hand(tmp_path, 1, 2, "--issync=1", "--max_steps=1000000") as tasks:
        tasks["worker/1"].wait_for("step=1 ", 60)
        tasks["ps/0"].signal(signal.SIGKILL)
        assert tasks["ps/0"].wait(100) == -signal.SIGKILL
        for worker in (tasks["worker/0"], tasks["worker/1"]):
            assert worker.wait(100) == 170, worker.output()
            assert "lost ps/0" in worker.output()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "gossip"])
def test_a_chief_without_ps_saves_when_a_worker_is_not_replaced(tmp_path: Path, mode: str) -> None:
    """It has the only copy: the checkpoint is of the last step, or of the last mean, and no step of it is lost."""
    every = 5 if mode == "gossip" else 1
    flags = [f"--mode={mode}", *(["--collect_every=5"] if mode == "gossip" else []), "--save_checkpoint_secs=600"]
    flags += [f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}", "--max_steps=1000000"]
    (tmp_path / "mine.py").write_text(slow(0.02))
    with by_hand(tmp_path, 0, 3, *flags, "--steps_to_validate=1") as tasks:
        tasks["worker/0"].wait_for_step(20, 60)
        tasks["worker/2"].signal(signal.SIGKILL)
        assert [tasks[f"worker/{index}"].wait(100) for index in range(2)] == [170, 170]
        said = tasks["worker/0"].output()
    assert "lost worker/2" in said, said
    last = max(int(number) for number in re.findall(r"step=(\d+)", said))
    step = int(load_variable(tmp_path / "m", "global_step"))
    assert last - every <= step <= last + every, said
    assert step % every == 0
    assert load_variable(tmp_path / "m", "weight") == pytest.approx(-step * (1 + 2 + 4) / 3, rel=1e-5)


def test_a_lost_worker_ends_a_sync_job_with_170(tmp_path: Path) -> None:
    """In sync the others cannot go on without a killed worker: they name it and end with 170; nobody hangs."""
    flags = ("--issync=1", "--max_steps=1000000", "--start_timeout_secs=25")
    with by_hand(tmp_path, 1, 2, *flags) as tasks:
        tasks["worker/1"].wait_for("step=1 ", 60)
        tasks["worker/1"].signal(signal.SIGKILL)
        assert tasks["worker/0"].wait(100) == 170
        assert "lost worker/1" in tasks["worker/0"].output()
        assert tasks["ps/0"].wait(100) == 170


def test_async_goes_on_without_a_killed_worker_and_still_takes_every_step(tmp_path: Path) -> None:
    """In async the others finish a killed worker's share; the step it may have drawn is taken too; everyone ends."""
    model, steps = tmp_path / "slow.py", 400
    model.write_text(slow(0.01, until=tmp_path / "go"))
    flags = (f"--model={model}", f"--max_steps={steps}", "--steps_to_validate=10", f"--model_dir={tmp_path / 'm'}")
    with by_hand(tmp_path, 1, 2, *flags) as tasks:
        tasks["worker/1"].wait_for("step=", 60)
        tasks["worker/1"].signal(signal.SIGKILL)
        assert tasks["worker/1"].wait(100) == -signal.SIGKILL
        (tmp_path / "go").touch()
        assert tasks["worker/0"].wait(120) == 0, tasks["worker/0"].output()
        assert tasks["ps/0"].wait(100) == 0
    assert summary(tmp_path / "m")["global_step"] == steps


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_with_a_wrong_address_for_itself_does_not_replace_the_right_one(tmp_path: Path, mode: str) -> None:
    """It is refused, with the address at which that one runs; its supervisor reports no failure, and all is trained."""
    model, steps = tmp_path / "slow.py", 50
    model.write_text(slow(0.001, until=tmp_path / "go", batch=15))
    flags = (f"--mode={mode}", f"--model={model}", f"--max_steps={steps}", f"--model_dir={tmp_path / 'm'}")
    with held_ports(4) as ports, processes() as started:
        ps, chief, right, wrong = (f"127.0.0.1:{port}" for port in ports)

        def start(job: str, index: int, second: str, *more: str) -> Process:
            me = [f"--job_name={job}", f"--task_index={index}", f"--ps_hosts={ps}", f"--worker_hosts={chief},{second}"]
            started.append(Process(tmp_path / f"{len(started)}.out", *me, *flags, *more))
            return started[-1]

        tasks = [start("ps", 0, right), start("worker", 0, right), start("worker", 1, right)]
        for worker in tasks[1:]:
            worker.wait_for("training", 100)
        cluster, me = Cluster((ps,), (chief, wrong)), Task("worker", 1)
        config = JobConfig(mode=mode, model=str(model), max_steps=steps)
        with pytest.raises(ConfigError, match=f"worker/1 runs at {right} already"):
            duplicate_worker.check(config, cluster, me)
        refused = start("worker", 1, wrong, "--max_restarts=1")
        assert refused.wait(100) == 2, refused.output()
        assert f"worker/1 runs at {right} already, but --worker_hosts has {wrong} for it here" in refused.output()
        other = start("worker", 1, wrong, "--wire=plain")  # if it opened a session, that would end the right one's
        assert other.wait(100) == 2, other.output()
        assert f"--wire=plain here, packed on ps/0 ({ps})" in other.output()
        (tmp_path / "go").touch()
        assert [task.wait(100) for task in tasks] == [0, 0, 0], [task.output() for task in tasks]
    reported = summary(tmp_path / "m")
    assert reported["global_step"] == steps
    assert reported["tasks"]["worker/1"]["steps"] > 0


def test_workers_that_come_back_in_another_order_are_refused(tmp_path: Path) -> None:
    """The PS live on with the former order: restarting would not help, so it is a mistake of the flags."""
    model = tmp_path / "slow.py"
    model.write_text(slow(0.001, until=tmp_path / "never", batch=15))
    with held_ports(3) as ports, processes() as started:
        ps, *workers = (f"127.0.0.1:{port}" for port in ports)

        def start(job: str, index: int, hosts: list[str]) -> Process:
            me = [f"--job_name={job}", f"--task_index={index}", f"--ps_hosts={ps}", f"--worker_hosts={','.join(hosts)}"]
            name = tmp_path / f"{len(started)}.out"
            started.append(Process(name, *me, f"--model={model}", f"--model_dir={tmp_path / 'm'}"))
            return started[-1]

        start("ps", 0, workers)
        for worker in (first := [start("worker", index, workers) for index in range(2)]):
            worker.wait_for("training: mode", 100)
        for worker in first:
            worker.signal(signal.SIGKILL)
            assert worker.wait(100) == -signal.SIGKILL
        again = [start("worker", index, workers[::-1]) for index in range(2)]
        assert 2 in [task.wait(100) for task in again]
        said = "".join(task.output() for task in again)
        assert f"--worker_hosts={workers[1]},{workers[0]} here, {workers[0]},{workers[1]} on the PS" in said


def test_who_reads_the_output_may_be_gone(tmp_path: Path) -> None:
    """Where nobody reads any more what a task says, its exit code is still that of its error, and its log has it."""
    reader, writer = os.pipe()
    os.close(reader)
    with held_ports(2) as ports:
        cluster = [f"--ps_hosts=127.0.0.1:{ports[0]}", f"--worker_hosts=127.0.0.1:{ports[1]}", "--start_timeout_secs=1"]
        me = ["--job_name=ps", "--task_index=0", f"--model_dir={tmp_path}"]
        code = subprocess.call([*TFPS, *cluster, *me], stdout=writer, stderr=writer, env=environment(), timeout=200)
    os.close(writer)
    assert code == 171
    assert "error: the cluster did not form: no answer from worker/0" in (tmp_path / "logs" / "ps-0.log").read_text()


def test_whose_failure_counts_for_the_run_on_the_ps(tmp_path: Path) -> None:
    """Any other worker's does, which has no directory of its own; a chief's only if its directory is that run's."""
    mine, emptied = tmp_path / "mine", tmp_path / "emptied"
    mine.mkdir()
    (mine / "job.json").write_text("{}")
    for model_dir, chiefs_counts in ((mine, True), (emptied, False)):
        run = json.dumps(compatibility.new_run(str(model_dir)))
        later = time.monotonic() + 1000  # the supervisor of this worker started then: it has not begun the run
        for index, counts in ((0, chiefs_counts), (1, True)):
            config = JobConfig(model_dir=str(model_dir))
            assert failure_notice._is_of_run(config, Task("worker", index), run, later) == counts
