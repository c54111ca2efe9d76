"""``tfps plan``: show where variables go and what a step sends, without starting a job."""

from collections.abc import Sequence

from tfps.cli.command import Command, with_tensorflow
from tfps.cli.validation import ProblemCollector, check_job
from tfps.cluster.spec import Cluster
from tfps.models import loader
from tfps.modes import registry


def _plan(argv: Sequence[str]) -> int:
    """Print where variables go and what a step sends."""
    problems = ProblemCollector(COMMAND.name)
    job = problems.read(COMMAND.flags, argv).config
    job = registry.sized(job)
    job = job.replace(num_ps=1 if job.num_ps is None else job.num_ps, num_workers=job.num_workers or 2)
    check_job(job, job.num_workers, problems)
    with_tensorflow(problems)
    from tfps.cli.tables import print_plan  # noqa: PLC0415
    from tfps.runtime.graph import plan  # noqa: PLC0415  imports TensorFlow

    hosts = [f"task{index}:2222" for index in range((job.num_ps or 0) + (job.num_workers or 2))]
    members = Cluster(tuple(hosts[: job.num_ps]), tuple(hosts[job.num_ps :]))
    print_plan(job, members, plan.make(job, members, loader.load(job.model)))
    return 0


COMMAND = Command(
    "plan",
    _plan,
    ("size", "job", "training", "mode", "placement", "performance"),
    "show the placement of variables, without starting",
    "Prints each variable's parameter server, the bytes of each, and what one step sends over the wire.",
    "tfps plan --model=mnist --num_ps=2",
)
