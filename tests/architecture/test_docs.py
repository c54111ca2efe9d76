"""The README says what the code does."""

import re

import pytest
from support.processes import REPO

from tfps.cli import main
from tfps.config import job_config
from tfps.models import loader

README = (REPO / "README.md").read_text()
CHOICES = {**main.CHOICES, "model": tuple(loader.BUILTIN)}


@pytest.mark.parametrize("name", job_config.FIELDS)
def test_every_flag_has_its_row(name: str) -> None:
    """The table of flags has each flag with the help, the choices and the default that ``--help`` shows."""
    [row] = re.findall(rf"^\| `--{name}` \| (.*) \|$", README.partition("## Flags")[2], re.MULTILINE)
    helped = " ".join(job_config.describe([name], CHOICES, 10_000).split())
    assert helped.endswith(f"--{name} {row}")


def test_no_flag_that_is_not() -> None:
    """The README mentions no flag that tfps does not have."""
    mentioned = set(re.findall(r"--([a-z_]+)", README))
    assert mentioned - set(job_config.FIELDS) == set()


def test_its_commands_are_there() -> None:
    """The scripts and verbs that the README names exist."""
    assert all((REPO / script).is_file() for script in re.findall(r"scripts/[\w/.]*\w", README))
    verbs = set(re.findall(r"(?:^|`|\$ )tfps ([a-z]+)\b", README, re.MULTILINE))
    assert {"launch", "submit", "status", "logs", "cancel"} <= verbs <= set(main.COMMANDS)


def test_links_lead_somewhere() -> None:
    """Every relative link of the README is a file of the repository."""
    assert all((REPO / link).exists() for link in re.findall(r"\]\(([^):]+)\)", README))
