"""What the command line refuses beside single flags."""

import pytest

from tfps.cli.validation import ProblemCollector, check_mode
from tfps.errors import ConfigError

FLAGS = ["mode", "issync", "runs_in_flight", "num_workers", "aggregate", "backup_workers"]


def check(*argv: str, num_workers: int | None = None) -> None:
    """Check a command line, and the mode that it gives."""
    problems = ProblemCollector("launch")
    check_mode(problems.read(FLAGS, argv).config, num_workers, problems)
    problems.settle()


@pytest.mark.parametrize("sync", ["--mode=sync", "--issync=1"])
def test_overlapping_runs_are_for_async(sync: str) -> None:
    """In sync a second run under way is refused, not ignored; one is what sync has anyway."""
    with pytest.raises(ConfigError, match=r"^--runs_in_flight=2 is for --mode=async: .* Leave it out\.$"):
        check(sync, "--runs_in_flight=2")
    check(sync, "--runs_in_flight=1")
    check("--issync=0", "--runs_in_flight=2")


def test_an_unknown_number_of_workers_is_the_only_problem() -> None:
    """How many gradients an update has is not known then."""
    with pytest.raises(ConfigError, match=r"^--num_workers="):
        check("--mode=sync", "--aggregate=krum", "--num_workers=abc", num_workers=2)
    check("--mode=sync", "--aggregate=krum")
    too_few = (
        r"^--aggregate=krum needs 5 gradients or more, and .* has 2 gradients: add workers, --num_workers=5 or more"
    )
    with pytest.raises(ConfigError, match=too_few):
        check("--mode=sync", "--aggregate=krum", num_workers=2)
    too_many = r"^--backup_workers=2 is too large: a job of 2 workers allows .*: give fewer, or --num_workers=3 or more"
    with pytest.raises(ConfigError, match=too_many):
        check("--mode=sync", "--backup_workers=2", num_workers=2)
    with pytest.raises(ConfigError, match=r"^--aggregate=sum is for --mode=sync, and this job has --mode=async: "):
        check("--aggregate=sum", num_workers=2)


def test_a_wrong_mode_is_the_only_problem() -> None:
    """What the flags of a mode that does not exist mean is not known."""
    with pytest.raises(ConfigError) as refused:
        check("--mode=sinc", "--runs_in_flight=2")
    assert len(refused.value.problems) == 1
