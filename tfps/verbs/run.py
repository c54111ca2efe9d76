"""``tfps run``: be one task."""

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from tfps import cluster, models, slurm_env
from tfps.config import JobConfig
from tfps.errors import TfpsError
from tfps.report import one_line
from tfps.runtime import farewell, logs, net, task
from tfps.verbs.problems import Problems, tell
from tfps.verbs.verb import JOB, Verb

ROLE = "--ps_hosts=h0:2222 --worker_hosts=h1:2222,h2:2222 --job_name=worker --task_index=0"


def _run(argv: Sequence[str]) -> int:
    """Be one task."""
    problems = Problems()
    job = problems.read(VERB.flags, argv)
    problems.of(models.check, job.model)
    sizes = job.num_ps, job.num_workers
    place = problems.of(
        cluster.resolve, job.ps_hosts, job.worker_hosts, job.job_name, job.task_index, *sizes, os.environ
    )
    problems.of(models.check_data, job.model, job.data_dir, place[0].num_workers if place else 1)
    if place and place[1].job == "evaluator" and not job.model_dir:
        problems.add("--model_dir is missing: the evaluator reads the checkpoints there.")
    problems.of(task.require_tensorflow)
    problems.settle()
    assert place is not None
    members, me = place
    if cluster.is_slurms(job.ps_hosts, job.worker_hosts, os.environ):
        members = on_machines(members, job.port_base)
        port_flag = "--port_base"
    else:
        port_flag = f"--{me.job}_hosts"
    if job.max_restarts:
        return _supervise(job, members, me)
    return _be_task(job, members, me, port_flag)


def _supervise(job: JobConfig, members: cluster.Cluster, me: cluster.Task) -> int:
    """Start the task in a process of its own, and again when it is lost."""
    from tfps.launchers.supervisor import Supervisor  # noqa: PLC0415  a task by itself has no use for it

    supervisor = Supervisor(job, members, me)
    code = supervisor.run()
    if code and me.job == "worker" and not supervisor.has_told(code):
        farewell.tell(job, members, me, code)
    return code


def on_machines(members: cluster.Cluster, port_base: int | None) -> cluster.Cluster:
    """Return a Slurm step's cluster, looked up."""
    nodes = [members.address(task).rpartition(":")[0] for task in members.tasks()]
    return cluster.placed(members, slurm_env.ask(nodes, os.environ), port_base or slurm_env.PORT_BASE)


def _be_task(job: JobConfig, members: cluster.Cluster, me: cluster.Task, port_flag: str) -> int:
    if me.job != "evaluator":
        net.check_port(members.address(me), port_flag)
    console = logs.open_log(logs.log_file(job.model_dir, str(me)))
    try:
        task.run(job, members, me)
        code = 0
    except TfpsError as error:
        code = error.exit_code
        with contextlib.suppress(OSError):  # whoever read it may be gone
            tell(error, console)
    except Exception as error:
        code = 1
        with contextlib.suppress(OSError):
            traceback.print_exc()
            console.write(f"error: {type(error).__name__}: {one_line(str(error))} (a bug in tfps: see the log)\n")
    atexit._run_exitfuncs()  # autograph and others remove their temporary files here
    for stream in (sys.stdout, sys.stderr, console):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # TensorFlow's server cannot be stopped, and its threads do not let the interpreter end in order


VERB = Verb(
    _run,
    ("cluster", "task", "size", *JOB, "supervision"),
    "be one task of a cluster",
    "Start it once for each task, on any machines, with the same flags but --job_name and --task_index. All tasks "
    "end by themselves when the job is done.",
    f"tfps run {ROLE} --issync=1",
)
