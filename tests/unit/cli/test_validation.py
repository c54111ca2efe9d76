"""What the command line refuses beside single flags."""

import pytest

from tfps.cli.validation import ProblemCollector
from tfps.errors import ConfigError

FLAGS = ["mode", "issync", "runs_in_flight"]


@pytest.mark.parametrize("sync", ["--mode=sync", "--issync=1"])
def test_overlapping_runs_are_for_async(sync: str) -> None:
    """In sync a second run under way is refused, not ignored; one is what sync has anyway."""
    refused = ProblemCollector()
    refused.read(FLAGS, [sync, "--runs_in_flight=2"])
    with pytest.raises(ConfigError, match=r"^--runs_in_flight=2 is for --mode=async: .* Leave it out\.$"):
        refused.settle()
    allowed = ProblemCollector()
    allowed.read(FLAGS, [sync, "--runs_in_flight=1"])
    allowed.read(FLAGS, ["--issync=0", "--runs_in_flight=2"])
    allowed.settle()
