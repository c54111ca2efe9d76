"""``tfps submit --to=slurm`` without Slurm: the script, what is refused, and what Slurm's words are taken for.

Beside these, ``tests/platforms/test_slurm.py`` runs jobs on a real Slurm.
"""

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from support.jobs import changed, job_of
from support.processes import NASTY, golden, run_tfps

from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN
from tfps.jobs.spec import Job
from tfps.launchers.common.job_files import Files
from tfps.launchers.slurm import job as slurm_job
from tfps.launchers.slurm.job import Node
from tfps.launchers.slurm.launcher import Plan, SlurmLauncher

SMALL = job_of("mnist", python="/venv/bin/python", at="/home/me", model="mnist", model_dir="/shared/m")
FULL = changed(
    SMALL,
    num_ps=2,
    num_workers=2,
    ps_cpu=1.5,
    ps_memory=2**30 + 1,
    worker_cpu=16.0,
    worker_memory=64 * 2**30,
    worker_gpu=8,
    queue="gpu,long",
    mode="sync",
)


def planned(job: Job) -> Plan:
    """Return the plan of a job."""
    return SlurmLauncher().plan(job)


SERVICE = changed(SMALL, model="service", serve=True, num_ps=2, optimizer="adam", ps_cpu=2.0, ps_memory=2**30)
JOBS = {"small": SMALL, "full": FULL, "without-ps": changed(SMALL, num_ps=0), "service": SERVICE}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name: str) -> None:
    """Like tasks; 2 machines of 8 GPUs and 2 parameter servers without any; workers alone; servers of a service."""
    job = JOBS[name]
    plan = str(planned(job))
    assert plan == golden(f"slurm-{name}.sh", plan)
    assert not planned(job).is_printed_only


@pytest.mark.parametrize("job", [SMALL, FULL])
def test_scripts_are_bash(job: Job) -> None:
    """Bash reads the script, with any value in it, to its end and finds nothing to complain of."""
    script = str(planned(changed(job, data_dir=NASTY, model_dir=NASTY)))
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=20)
    assert (read.returncode, read.stderr) == (0, "")


def test_memory_is_asked_for_per_cpu_and_rounded_up() -> None:
    """Two CPUs with 2^30 + 1 bytes get 513 MB each: never less than asked for."""
    assert "--mem-per-cpu=513" in str(planned(FULL))


@pytest.mark.parametrize("queue", ["a b", "a\n#SBATCH --uid=0", "'", "a;b", "$(id)"])
def test_a_queue_that_is_no_name_is_refused(queue: str) -> None:
    """What sbatch would read as something else is said before anything is sent."""
    with pytest.raises(ConfigError, match=r"--queue=.* is not the name of a partition"):
        planned(changed(SMALL, queue=queue))


@pytest.mark.parametrize("logs", ["/plain", NASTY, f"/a/{NASTY}/logs", "it's", ""])
def test_the_script_tells_where_its_files_are(logs: str, tmp_path: Path) -> None:
    """What a handle needs to know is read from the script that Slurm keeps, whatever the directory is called."""
    script = str(planned(changed(FULL, model_dir=logs or None)))
    expected = f"{logs}/logs" if logs else "/home/me/runs/mnist/logs"
    bin_dir = fake(tmp_path, "scontrol", f"cat <<'END'\n{script}\nEND\n")
    reported = with_path(bin_dir, lambda: slurm_job.files_of("7"))
    assert reported == Files(expected, {"worker": 2, "ps": 2}, "slurm")


def test_ports_of_neighboring_jobs_are_apart() -> None:
    """Each of 25 jobs one after the other has 864 ports on a node, below those that Linux gives out by itself.

    In 1400 jobs each has 16 ports.
    """
    bases = [8888 + job * 727 % 1400 * 16 for job in range(3000)]
    assert all(abs(a - b) >= 864 for n, a in enumerate(bases) for b in bases[n + 1 : n + 25])
    assert all(len(set(bases[n : n + 1400])) == 1400 for n in range(1600))
    assert max(bases) + 16 < 32768
    assert '"--port_base=$((8888 + SLURM_JOB_ID * 727 % 1400 * 16))"' in str(planned(SMALL))
    assert '"--port_base=9000"' in str(planned(changed(SMALL, port_base=9000)))


def test_without_slurm_a_plan_is_printed_and_a_job_is_refused(tmp_path: Path) -> None:
    """--dry_run needs no Slurm; to submit a job without sbatch says what is missing."""
    printed = run_tfps("submit", "--to=slurm", "--dry_run", cwd=tmp_path, PATH=str(tmp_path))
    assert printed.returncode == 0
    assert printed.stdout.startswith("#!/bin/bash\n")
    refused = run_tfps("submit", "--to=slurm", cwd=tmp_path, PATH=str(tmp_path))
    assert (refused.returncode, refused.stdout) == (69, "")
    assert refused.stderr.startswith("error: sbatch is not installed: use a login node")
    refused = run_tfps("status", "slurm:7", cwd=tmp_path, PATH=str(tmp_path))
    assert refused.stderr.startswith("error: scontrol is not installed: use a login node")


@pytest.mark.parametrize("name", ["", "x", "0", "-1", "1 2", "1;scancel"])
def test_a_handle_is_a_number(name: str) -> None:
    """Another is refused with an example."""
    with pytest.raises(ConfigError, match="like slurm:4711"):
        SlurmLauncher().find(name)


def test_room_on_nodes() -> None:
    """A node has room for as many tasks as its CPUs and its GPUs allow, and for none that needs more memory."""
    node = Node(cpus=8, memory_mb=1000, gpus=2)
    assert [node.room(2, 500, 0), node.room(1, 0, 1), node.room(9, 0, 0), node.room(1, 1001, 0)] == [4, 2, 0, 0]


def test_nodes_are_read_from_sinfo(tmp_path: Path) -> None:
    """The default partition's are taken, GPUs of all types counted; a partition that shares CPUs sets no limit."""
    rows = "4|1000|gpu:a100:2(S:0-1),gpu:t4:1|main*|NO\\n8|2000+|(null)|main*|NO\\n64|9000|gpu:8|big|NO\\n"
    bin_dir = fake(tmp_path, "sinfo", f"printf '{rows}'\n")
    main, big = [Node(4, 1000, 3), Node(8, 2000, 0)], [Node(64, 9000, 8)]
    assert with_path(bin_dir, lambda: slurm_job.partitions(None)) == {"main": main}
    assert with_path(bin_dir, lambda: slurm_job.partitions("main,big")) == {"main": main, "big": big}
    bin_dir = fake(tmp_path, "sinfo", "echo '4|1000|(null)|main*|FORCE:4'\n")
    assert with_path(bin_dir, lambda: slurm_job.partitions("main")) == {}


def rows(partition: str, *nodes: tuple[int, int]) -> str:
    """Return what sinfo tells of a partition's nodes, each by its CPUs and its GPUs."""
    return "".join(f"{cpus}|1000|gpu:{gpus}|{partition}|NO\\n" for cpus, gpus in nodes)


ONE, TWO = rows("main*", (4, 2)), rows("main*", (4, 2), (4, 2))
EDGE = rows("main*", (4, 0), (4, 2))


@pytest.mark.parametrize(
    ("asked", "cluster", "fits"),
    [
        ({"num_workers": 3}, ONE, True),
        ({"num_workers": 4}, ONE, False),  # 4 workers and 1 PS on 4 CPUs
        ({"num_workers": 7}, TWO, True),
        ({"num_workers": 8}, TWO, False),
        ({"worker_gpu": 1}, ONE, False),  # two components on one node
        ({"worker_gpu": 1}, TWO, True),
        ({"worker_gpu": 1}, EDGE, True),
        ({"worker_gpu": 1, "num_ps": 4}, EDGE, True),
        ({"worker_gpu": 1, "num_ps": 5}, EDGE, False),  # the PS would need a part of the only node with GPUs
        ({"worker_gpu": 1, "num_ps": 5, "num_workers": 2}, EDGE + rows("main*", (1, 1)), True),
        ({"worker_gpu": 1, "num_ps": 5, "num_workers": 3}, EDGE + rows("main*", (1, 1)), False),
        ({"num_workers": 4}, rows("main*", (2, 0), (2, 0), (1, 0)), True),
        ({"num_workers": 4, "queue": "a,b"}, rows("a", (4, 0)) + rows("b", (4, 0)), False),  # it runs in one of them
        ({"num_workers": 4, "queue": "a,b"}, rows("a", (4, 0)) + rows("b", (5, 0)), True),
        ({"worker_gpu": 1, "queue": "a,b"}, rows("a", (4, 0)) + rows("b", (4, 2)), True),  # each component in one
        ({"num_workers": 40}, ONE.replace("NO", "YES:4"), True),
        ({"num_workers": 40}, "", True),
    ],
)
def test_only_a_job_that_can_never_run_is_refused(
    asked: dict[str, int | str], cluster: str, fits: bool, tmp_path: Path
) -> None:
    """All tasks together must have room; those of a heterogeneous job also on nodes of their own for each role."""
    bin_dir = fake(tmp_path, "sinfo", f"printf '{cluster}'\n")
    for name, script in (("scontrol", ""), ("sbatch", "echo 7\n")):
        fake(tmp_path, name, script)
    plan = planned(changed(SMALL, **asked))
    if fits:
        assert with_path(bin_dir, lambda: SlurmLauncher().submit(plan)).handle == "slurm:7"
    else:
        with pytest.raises(ConfigError, match="has room for"):
            with_path(bin_dir, lambda: SlurmLauncher().submit(plan))


@pytest.mark.parametrize(("queue", "given"), [("long", ["--parsable", "--partition=long"]), (None, ["--parsable"])])
def test_queue_wins_over_the_environment(
    queue: str | None, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of sbatch comes before SBATCH_PARTITION, and that before an option in the script."""
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    told = shlex.quote(str(tmp_path / "told"))
    fake(tmp_path, "sinfo", f'echo "${{@: -1}}" >{told}\n')
    fake(tmp_path, "scontrol", "")
    bin_dir = fake(tmp_path, "sbatch", f'echo "$@" >>{told}; echo 7\n')
    with_path(bin_dir, lambda: SlurmLauncher().submit(planned(changed(SMALL, queue=queue))))
    looked, sent = (tmp_path / "told").read_text().splitlines()
    assert looked == f"--partition={queue or 'short'}"
    assert sent.split() == given


RUN = """\
run 0
worker/0 started on n1
ps/0 started on n2
worker/0 ended with 143 on n1
ps/0 ended with 74 on n2
requeued after 143
"""


@pytest.mark.parametrize(
    ("known", "more", "state", "worker", "reason"),
    [
        ({"JobState": "PENDING", "Reason": "Resources", "Restarts": "1"}, "", PENDING, (PENDING, 143), "Resources"),
        ({"JobState": "RUNNING"}, "run 1\nworker/0 started on n1\n", RUNNING, (RUNNING, 143), ""),
        ({"JobState": "RUNNING"}, "run 1\n", RUNNING, (PENDING, 143), ""),
        ({"JobState": "COMPLETED"}, "run 1\nworker/0 ended with 0 on n1\n", SUCCEEDED, (SUCCEEDED, 0), ""),
        ({"JobState": "CANCELLED"}, "", CANCELLED, (CANCELLED, 143), ""),
        ({"JobState": "TIMEOUT", "ExitCode": "0:15"}, "", FAILED, (FAILED, 143), "TIMEOUT, signal 15"),
        ({"JobState": "NODE_FAIL"}, "run 1\n", FAILED, (FAILED, None), "NODE_FAIL"),
        ({"JobState": "NODE_FAIL"}, "run 1\nworker/0 started on n1\n", FAILED, (FAILED, None), "NODE_FAIL"),
        ({"JobState": "FAILED"}, "run 1\nworker/0 ended with 65 on n1\n", FAILED, (FAILED, 65), ""),
        (None, "ended with exit code 0\n", SUCCEEDED, (SUCCEEDED, 143), ""),
        (None, "ended with exit code 66\n", FAILED, (FAILED, 143), ""),
        (None, "", UNKNOWN, (FAILED, 143), ""),
    ],
)
def test_status_is_slurms_word_and_the_jobs_own(
    known: dict[str, str] | None, more: str, state: str, worker: tuple[str, int | None], reason: str, tmp_path: Path
) -> None:
    """The job's state is Slurm's, or its script's where Slurm has forgotten it; each task's is what it told."""
    (tmp_path / "slurm-7.out").write_text(RUN + more)
    reported = slurm_job.status("7", known, Files(str(tmp_path), {"worker": 1, "ps": 1}, "slurm"))
    assert (reported.state, reported.reason) == (state, reason)
    if (known or {}).get("JobState") != "COMPLETED" and known is not None:
        task = reported.tasks[Task("worker", 0)]
        assert (task.state, task.exit_code) == worker


def test_the_cause_of_a_failure_comes_first(tmp_path: Path) -> None:
    """Of tasks that failed, the first that cannot be helped; it is what the command that waits exits with."""
    (tmp_path / "slurm-7.out").write_text(RUN)
    files = Files(str(tmp_path), {"ps": 1, "worker": 2}, "slurm")
    assert next(iter(slurm_job.status("7", {"JobState": "FAILED"}, files).tasks)) == Task("ps", 0)
    (tmp_path / "slurm-7.out").write_text(RUN.replace("74", "170"))
    assert next(iter(slurm_job.status("7", {"JobState": "FAILED"}, files).tasks)) == Task("worker", 0)
    (tmp_path / "slurm-7.out").write_text(RUN.replace("74", "67"))  # a worker has told the PS
    assert next(iter(slurm_job.status("7", {"JobState": "FAILED"}, files).tasks)) == Task("worker", 0)


def test_a_ps_that_was_told_is_not_the_cause(tmp_path: Path) -> None:
    """Though it ended first, and no other code is final: the first after it is, as the job's script decides too."""
    files = Files(str(tmp_path), {"ps": 1, "worker": 2}, "slurm")
    for first, second in ((137, 143), (143, 137), (170, 137), (172, 1)):
        ends = (("ps/0", 67), ("worker/1", first), ("worker/0", second))
        (tmp_path / "slurm-7.out").write_text("".join(f"{task} ended with {code} on n1\n" for task, code in ends))
        assert files.record("7").cause() == [Task("worker", 0 if second == 1 else 1)]
    (tmp_path / "slurm-7.out").write_text("ps/0 ended with 67 on n1\nworker/0 ended with 0 on n1\n")
    assert files.record("7").cause() == [Task("ps", 0)]


def test_accounting_is_asked_for_what_slurm_forgot(tmp_path: Path) -> None:
    """Where there is accounting, it knows the state of a job that slurmctld has forgotten."""
    fake(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    bin_dir = fake(tmp_path, "sacct", "echo 'CANCELLED by 0|143:0'\n")
    assert with_path(bin_dir, lambda: slurm_job.ask("7")) == {"JobState": "CANCELLED", "ExitCode": "143:0"}


def fake(tmp_path: Path, name: str, script: str) -> Path:
    """Write a program that stands in for one of Slurm's."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}")
    path.chmod(0o755)
    return path.parent


def with_path(bin_dir: Path, call):  # type: ignore[no-untyped-def]
    """Call a function while a directory's programs come first."""
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{bin_dir}:{before}"
    try:
        return call()
    finally:
        os.environ["PATH"] = before


SRUN = """\
export SLURM_JOB_ID=7 SLURMD_NODENAME=n1
while [[ $1 == --* ]]; do shift; done
for SLURM_PROCID in $ORDER; do
  export SLURM_PROCID
  "$@"
done
exit ${SRUN_CODE:-143}
"""


def run_script(codes: str, count: str, tmp_path: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run the script of a job whose tasks end with these codes, on its nth restart; ``asked`` is what scontrol got."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\ncodes=({codes})\nexit ${{codes[SLURM_PROCID]}}\n")
    python.chmod(0o755)
    fake(tmp_path, "srun", SRUN)
    ends_all = 'kill -TERM "$PPID" $$'  # as Slurm does before scontrol has ended
    bin_dir = fake(tmp_path, "scontrol", f'echo "$@" >>{shlex.quote(str(tmp_path))}/asked\n{ends_all}\n')
    job = changed(SMALL, model_dir=str(tmp_path / "m"))
    script = str(planned(dataclasses.replace(job, python=str(python), directory=str(tmp_path))))
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "ORDER": "0 1 2", "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = count
    return subprocess.run(["bash", "-c", script], env=env, timeout=20, check=False)


@pytest.mark.parametrize(
    ("codes", "count", "code", "requeued"),
    [
        ("0 143 143", "0", 143, True),
        ("0 143 65", "0", 65, False),
        ("77 143 143", "0", 77, False),
        ("170 143 143", "0", 170, False),
        ("137 143 143", "0", 137, True),
        ("137 143 143", "10", 137, False),
        ("67 137 143", "0", 137, True),
        ("67 172 143", "0", 172, False),
        ("67 77 143", "0", 77, False),
    ],
)
def test_what_the_script_makes_of_exit_codes(codes: str, count: str, code: int, requeued: bool, tmp_path: Path) -> None:
    """It ends as the task that is the cause, and is requeued, ten times, if it was killed; else it has tried enough."""
    ended = run_script(codes, count, tmp_path)
    assert ended.returncode == code
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
    said = (tmp_path / "m/logs/slurm-7.out").read_text()
    assert (f"requeued after {code}\n" if requeued else f"ended with exit code {code}\n") in said


def test_a_full_disk_does_not_requeue_a_job_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tee`` writes on to its output, and fails, where it cannot write its file."""
    monkeypatch.setenv("SRUN_CODE", "0")
    fake(tmp_path, "tee", "export PATH=/usr/bin:/bin; exec tee /dev/full\n")
    assert run_script("0 0 0", "0", tmp_path).returncode == 0
    assert not (tmp_path / "asked").exists()
    assert run_script("0 65 0", "0", tmp_path).returncode == 65
