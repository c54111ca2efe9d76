"""Jobs on a real Slurm of three nodes: they train, are cancelled, lose a node, reach a time limit, and arrive as given.

The nodes' names do not resolve, and the nodes are one machine: so every test also proves that tasks find each other
there.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import (
    ECHO,
    NASTY,
    REPO,
    TFPS,
    Process,
    argv_of,
    environment,
    processes,
    run_tfps,
    slow,
    summary,
    wait_gone,
)
from support.slurm_engine import Slurm, slurm

ENDS = 500.0  # seconds within which anything here ends, even on a busy machine

SLOW = slow(0.05)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yield a running Slurm; whatever its jobs leave running fails the last test."""
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def slow_model(directory: Path) -> str:
    """Write the slow model, and return its path."""
    path = directory / "slow.py"
    path.write_text(SLOW)
    return str(path)


def submit(engine: Slurm, *flags: str, **env: str) -> str:
    """Submit a job, and return its id."""
    result = run_tfps("submit", "--to=slurm", *flags, **conf(engine), **env)
    assert result.returncode == 0, result.stderr
    handle = result.stdout.strip()
    assert re.fullmatch("slurm:[0-9]+", handle)
    return handle.partition(":")[2]


def conf(engine: Slurm) -> dict[str, str]:
    """Return what a user's environment says of the Slurm."""
    return {"SLURM_CONF": str(engine.conf)}


def said(model_dir: Path, job_id: str, task: str) -> Path:
    """Return the file with what a task said."""
    return model_dir / "logs" / f"slurm-{job_id}-{task}.out"


def wait_for(path: Path, text: str, secs: float = ENDS) -> None:
    """Wait until a file holds a text."""
    subprocess.run(
        ["bash", "-c", 'until grep -qsF -- "$1" "$2"; do sleep 0.2; done', "wait", text, str(path)],
        timeout=secs,
        check=True,
    )


def slurm_log(model_dir: Path, job_id: str) -> str:
    """Return what a job's script and srun said."""
    return (model_dir / "logs" / f"slurm-{job_id}.out").read_text()


def test_an_async_job_is_watched_to_its_end(engine: Slurm, tmp_path: Path) -> None:
    """One ps and three workers, all alike, train MNIST; the view shows them, and the command ends as the job does."""
    flags = ("--model=mnist", f"--model_dir={tmp_path / 'm'}", "--max_steps=60", "--num_workers=3")
    result = run_tfps("submit", "--to=slurm", *flags, "--wait", timeout=ENDS, **conf(engine))
    assert result.returncode == 0, result.stdout + result.stderr
    handle, *lines = result.stdout.splitlines()
    assert any(line.startswith("worker/2 | training") for line in lines)
    assert any(line.startswith("job      | step=") for line in lines)
    assert "done: step 60 " in result.stdout
    assert summary(tmp_path / "m")["global_step"] == 60
    assert engine.field(handle.partition(":")[2], "JobState") == "COMPLETED"
    status = run_tfps("status", handle, **conf(engine)).stdout
    assert re.search(r"worker/2 +SUCCEEDED +0 +0 +n[123]", status), status


def test_values_and_gpus_arrive_as_asked_for(engine: Slurm, tmp_path: Path) -> None:
    """A heterogeneous sync job: each worker has its own GPU and its CPUs, and any text arrives as it was given."""
    nasty = tmp_path / NASTY
    (nasty / "data").mkdir(parents=True)
    model = nasty / "echo.py"
    model.write_text(f"{ECHO}\nimport os\nprint('gpus', os.environ.get('CUDA_VISIBLE_DEVICES'))\n")
    flags = (f"--model={model}", f"--model_dir={nasty / 'm'}", f"--data_dir={nasty / 'data'}", "--max_steps=4")
    sizes = ("--worker_gpu=1", "--worker_cpu=2", "--worker_memory=500Mi", "--ps_memory=100Mi")
    result = run_tfps("submit", "--to=slurm", *flags, *sizes, "--issync=1", "--wait", timeout=ENDS, **conf(engine))
    assert result.returncode == 0, result.stdout + result.stderr
    argv = argv_of("\n".join(line for line in result.stdout.splitlines() if line.startswith("worker/0")))
    assert {f"--model={model}", f"--model_dir={nasty / 'm'}", f"--data_dir={nasty / 'data'}"} <= set(argv)
    assert set(re.findall(r"worker/\d \| gpus (\d)$", result.stdout, re.MULTILINE)) == {"0", "1"}
    assert engine.field(result.stdout.split()[0].partition(":")[2], "NumCPUs") == "4"  # of the workers
    assert not list(tmp_path.rglob("spoilt"))
    assert not list(REPO.glob("spoilt"))
    assert summary(nasty / "m")["global_step"] == 4


def test_a_cancelled_job_has_saved(engine: Slurm, tmp_path: Path) -> None:
    """Every task of a cancelled job ends with 143, its state saved; logs --follow ends, and nothing goes on."""
    model_dir = tmp_path / "m"
    job = submit(engine, f"--model={slow_model(tmp_path)}", f"--model_dir={model_dir}", "--max_steps=100000")
    with processes() as started:
        flags = ("logs", f"slurm:{job}", "--task=worker:1", "--follow")
        started.append(Process(tmp_path / "followed", *flags, **conf(engine)))
        started[0].wait_for("step=10", ENDS)
        status = run_tfps("status", f"slurm:{job}", **conf(engine)).stdout
        assert re.search(r"worker/1 +RUNNING +0 +n[123]", status), status
        running = engine.tasks()
        assert len(running) >= 3
        result = run_tfps("cancel", f"slurm:{job}", timeout=ENDS, **conf(engine))
        assert result.returncode == 0, result.stderr
        assert started[0].wait(120) == 0
        assert "stopped by SIGTERM" in started[0].output()
    wait_gone(running, 30)
    assert engine.wait_state(job, "CANCELLED") == "CANCELLED"
    status = run_tfps("status", f"slurm:{job}", **conf(engine)).stdout
    assert len(re.findall(r"CANCELLED +143", status)) == 3, status
    saved = [int(path.stem.rpartition("-")[2]) for path in model_dir.glob("model.ckpt-*.index")]
    assert max(saved) >= 100


def test_a_job_that_loses_a_node_goes_on_elsewhere(engine: Slurm, tmp_path: Path) -> None:
    """A node is killed with all its tasks: the job is requeued, resumes from its checkpoint, and ends as it should."""
    model_dir = tmp_path / "m"
    flags = (f"--model={slow_model(tmp_path)}", f"--model_dir={model_dir}", "--max_steps=1000")
    # Tasks of two CPUs each: two on the first node, the last worker on another, and a third node is free.
    job = submit(engine, *flags, "--worker_cpu=2", "--ps_cpu=2", "--save_checkpoint_secs=1")
    wait_for(said(model_dir, job, "worker-0"), "saved")
    result = slurm_log(model_dir, job)
    [victim] = re.findall("worker/1 started on (n[123])", result)
    engine.crash(victim)
    engine.wait_state(job, "PENDING")
    engine.wait_state(job, "COMPLETED", "FAILED", secs=ENDS)
    engine.boot(victim)
    engine.wait_idle(victim)
    assert engine.field(job, "JobState") == "COMPLETED", slurm_log(model_dir, job)
    found = summary(model_dir)
    assert found["global_step"] == 1000
    assert found["resumed_from_step"] > 0
    assert re.search(r"worker/1 +SUCCEEDED +0 +1 ", run_tfps("status", f"slurm:{job}", **conf(engine)).stdout)


def test_a_time_limit_is_one_more_run(engine: Slurm, tmp_path: Path) -> None:
    """Before the time limit the tasks are asked to save; the job is requeued and goes on where it was."""
    model_dir = tmp_path / "m"
    flags = (f"--model={slow_model(tmp_path)}", f"--model_dir={model_dir}", "--max_steps=1600")
    job = submit(engine, *flags, SBATCH_TIMELIMIT="10")
    wait_for(said(model_dir, job, "worker-0"), "step=10")
    engine.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # Slurm looks every 30 s
    engine.wait_state(job, "PENDING")
    engine.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    wait_for(model_dir / "logs" / f"slurm-{job}.out", "requeued after 143", secs=20)
    engine.wait_state(job, "COMPLETED", "FAILED", secs=ENDS)
    assert engine.field(job, "JobState") == "COMPLETED", slurm_log(model_dir, job)
    found = summary(model_dir)
    assert found["global_step"] == 1600
    assert found["resumed_from_step"] >= 100
    assert "step=10" in said(model_dir, job, "worker-0").read_text()  # the first run's words are kept


def test_a_failure_that_would_repeat_itself_ends_the_job(engine: Slurm, tmp_path: Path) -> None:
    """A task that ends below 128 ends the others and the job, which is not requeued, with that exit code."""
    model = tmp_path / "nan.py"
    model.write_text(SLOW.replace('weight * features["x"]', "weight * float('nan')"))
    flags = (f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--wait")
    result = run_tfps("submit", "--to=slurm", *flags, timeout=ENDS, **conf(engine))
    assert result.returncode == 66, result.stdout + result.stderr
    assert re.match(r"error: worker/\d: the loss is nan", result.stderr)
    job = result.stdout.split()[0].partition(":")[2]
    assert engine.wait_state(job, "FAILED") == "FAILED"
    assert engine.field(job, "ExitCode") == "66:0"
    assert engine.field(job, "Restarts") == "0"


def test_a_task_that_has_used_up_its_restarts_is_the_cause(engine: Slurm, tmp_path: Path) -> None:
    """A worker is killed again and again, and the PS ends because it is told: the job is requeued for the worker."""
    model, model_dir = tmp_path / "killed.py", tmp_path / "m"
    model.write_text(f"import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n{SLOW}")
    job = submit(engine, f"--model={model}", f"--model_dir={model_dir}", "--max_restarts=1", "--num_workers=1")
    log = model_dir / "logs" / f"slurm-{job}.out"
    wait_for(log, "requeued after")
    engine.ask("scancel", job)
    ends = re.findall(r"^(\S+) ended with (\d+) on|requeued after (\d+)$", log.read_text(), re.MULTILINE)
    assert ends == [("worker/0", "137", ""), ("ps/0", "67", ""), ("", "", "137")]


def test_srun_alone_is_enough(engine: Slurm, tmp_path: Path) -> None:
    """Tasks that a user starts with srun on nodes without names find each other."""
    command = [*TFPS, "run", "--num_ps=1", "--model=linear", f"--model_dir={tmp_path / 'm'}", "--max_steps=20"]
    srun = ["srun", "--ntasks=3", "--nodes=3", "--chdir", str(REPO), *command]
    result = subprocess.run(
        srun, env=environment(**conf(engine)), capture_output=True, text=True, timeout=ENDS, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert summary(tmp_path / "m")["global_step"] == 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--worker_gpu=3",), "worker: the default partition has room for 0 of 2 tasks of 1 CPUs, 0 MB of memory"),
        (("--worker_cpu=5",), "worker: the default partition has room for 0 of 2 tasks of 5 CPUs"),
        (("--ps_memory=2G",), "ps: the default partition has room for 0 of 1 tasks of 1 CPUs, 1908 MB"),
        (("--num_workers=13",), "worker: the default partition has room for 12 of 13 tasks"),
        (("--num_workers=12",), "worker: the default partition has room for 11 of 12 tasks beside the parameter"),
        (("--worker_gpu=1", "--num_ps=9"), "worker: the default partition has room for 0 of 2 tasks beside the param"),
        (("--queue=nope",), "sbatch: sbatch: error: invalid partition specified: nope"),
    ],
)
def test_what_no_node_has_is_refused(engine: Slurm, tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    """A job that could never run is refused at once, and nothing of it is left in the queue."""
    result = run_tfps("submit", "--to=slurm", f"--model_dir={tmp_path}", *flags, **conf(engine))
    assert (result.returncode, result.stdout) == (
        69 if "sbatch:" in words else 2,
        "",
    )  # what Slurm itself refuses, or tfps
    assert words in result.stderr
    assert engine.ask("squeue", "--noheader", "--states=PENDING") == ""


def test_a_slurm_that_is_down_says_so(engine: Slurm, tmp_path: Path) -> None:
    """Without slurmctld every command ends with 69 and Slurm's own words, at once."""
    down = tmp_path / "slurm.conf"
    down.write_text(re.sub("SlurmctldPort=.*", "SlurmctldPort=1", engine.conf.read_text()))
    for argv in (("submit", "--to=slurm"), ("status", "slurm:1"), ("logs", "slurm:1"), ("cancel", "slurm:1")):
        result = run_tfps(*argv, SLURM_CONF=str(down))
        assert (result.returncode, result.stdout) == (69, "")
        assert re.fullmatch(r"error: scontrol ping: Slurmctld\(primary\) at \S+ is DOWN\n", result.stderr), (
            result.stderr
        )


def test_a_job_that_there_is_not_is_refused(engine: Slurm) -> None:
    """Status of a job that Slurm has never had is an error; of another program's job, too."""
    result = run_tfps("status", "slurm:999999", **conf(engine))
    assert result.returncode == 69
    assert "Slurm has had no such job yet" in result.stderr
    other = engine.ask("sbatch", "--parsable", "--output=/dev/null", "--wrap=true").strip()
    result = run_tfps("cancel", f"slurm:{other}", **conf(engine))
    assert result.returncode == 69
    assert "is another program's job" in result.stderr


def test_a_job_without_a_script_is_not_taken_for_ones_own(engine: Slurm) -> None:
    """An allocation of salloc or srun, of which Slurm keeps no script, is another's: it is neither shown nor ended."""
    engine.ask("salloc", "--no-shell", "--job-name=theirs", "--ntasks=1")
    theirs = engine.ask("squeue", "--noheader", "--name=theirs", "--format=%A").strip()
    try:
        for verb in ("status", "logs", "cancel"):
            result = run_tfps(verb, f"slurm:{theirs}", **conf(engine))
            assert (result.returncode, result.stdout) == (69, "")
            assert f"slurm:{theirs} is another program's job" in result.stderr
        assert engine.field(theirs, "JobState") == "RUNNING"
    finally:
        engine.ask("scancel", theirs)


def test_a_plan_that_was_kept_is_what_sbatch_takes(engine: Slurm, tmp_path: Path) -> None:
    """What --dry_run prints is submitted with sbatch as it is, and a job that waits is cancelled."""
    script = run_tfps("submit", "--to=slurm", f"--model_dir={tmp_path}", "--dry_run").stdout
    file = tmp_path / "job.sh"
    file.write_text(script)
    job = engine.ask("sbatch", "--parsable", "--hold", str(file)).strip()
    assert "PENDING" in run_tfps("status", f"slurm:{job}", **conf(engine)).stdout
    assert run_tfps("cancel", f"slurm:{job}", **conf(engine)).returncode == 0
    assert engine.field(job, "JobState") == "CANCELLED"


if __name__ == "__main__":  # a Slurm to try things on
    with slurm(Path(sys.argv[1])) as trial:
        print(json.dumps(trial.env()["SLURM_CONF"]))
        os.read(0, 1)
