"""Find a Ray cluster or start one, check its resources, and pass on its errors. Imports ray only where needed.

Ray's logs for its developers are not shown; errors come as exceptions.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfps.errors import ClientMissingError, ConfigError, PlatformError, TfpsError
from tfps.text import one_line

# By role: the number of tasks, and the resources that each takes from its node.
Bundles = Mapping[str, tuple[int, Mapping[str, float]]]

_FLAGS = {"CPU": "cpu", "GPU": "gpu", "memory": "memory"}
_MOST_NODES = 10_000  # Ray's own limit; by default it lists 100, and those that are gone count
_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


@contextlib.contextmanager
def words() -> Iterator[None]:
    """Convert errors of Ray's client inside to one plain line; they have no common base class.

    Raises:
        PlatformError: If there is one.
    """
    try:
        yield
    except TfpsError:
        raise
    except Exception as error:
        raise PlatformError(f"ray: {one_line(str(error))[:1000] or type(error).__name__}") from None


def find(address: str | None) -> Any:
    """Return a client of the cluster at an address, by default of the one that Ray finds; ``None`` if there is none.

    Raises:
        PlatformError: If ray is not installed, or the cluster does not answer.
    """
    _use_token()
    try:
        submission = importlib.import_module("ray.job_submission")
    except ImportError:
        raise ClientMissingError("ray is not installed: pip install 'ray[default]'.") from None
    logging.disable(logging.WARNING)
    if address:
        os.environ[_VARIABLES[0]] = address if "://" in address else f"http://{address}"  # Ray prefers this variable
    with words():
        try:
            return submission.JobSubmissionClient()
        except ConnectionError:
            if any(os.environ.get(name) for name in _VARIABLES):
                raise
            return None


def _use_token() -> None:
    """Make Ray send the token that it finds, as ``ray start`` does, unless RAY_AUTH_MODE is set."""
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    if given or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def start(bundles: Bundles) -> Any:
    """Start a cluster on this machine that ends with this process; return a client of it.

    It has at least as many cores as the tasks request, plus one: on one machine, they share the real ones.

    Raises:
        PlatformError: If it does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a user who submits a job did not agree to be counted
    cores = sum(count * bundle["CPU"] for count, bundle in bundles.values())
    with words():
        context = importlib.import_module("ray").init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(cores + 1)),
            include_dashboard=True,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        os.environ[_VARIABLES[0]] = f"http://{context.dashboard_url}"
        return importlib.import_module("ray.job_submission").JobSubmissionClient()


def check_room(client: Any, bundles: Bundles) -> None:
    """Refuse a job that the cluster could not hold even if it were empty.

    Raises:
        ConfigError: If a task fits on no node, or all tasks exceed all nodes together; the job would never start.
    """
    nodes = importlib.import_module("ray.util.state").list_nodes(
        address=client.get_address(), filters=[("state", "=", "ALIVE")], limit=_MOST_NODES, detail=True
    )
    found = problems([node.resources_total for node in nodes], bundles)
    if found:
        raise ConfigError(found)


def problems(nodes: list[Mapping[str, float]], bundles: Bundles) -> list[str]:
    """Return the requests that nodes with these resources can never satisfy."""
    found = []
    for role, (_, bundle) in bundles.items():
        for name, amount in bundle.items():
            most = max((node.get(name, 0) for node in nodes), default=0)
            if amount > most:
                found.append(
                    f"--{role}_{_FLAGS[name]}={_shown(name, amount)}: no node of the Ray cluster has more than "
                    f"{_shown(name, most)} {name} (nodes: {len(nodes)}): ask for less or add a node."
                )
    for name in {} if found else _FLAGS:
        asked = sum(count * bundle.get(name, 0) for count, bundle in bundles.values())
        there = sum(node.get(name, 0) for node in nodes)
        if asked > there:
            found.append(
                f"the job asks for {_shown(name, asked)} {name}, but all nodes of the Ray cluster together have "
                f"{_shown(name, there)}: ask for less or add a node."
            )
    return found


def _shown(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g}Gi" if name == "memory" else f"{amount:g}"


def check_name(client: Any, name: str) -> None:
    """Check that no job with this name runs: both would write the same files.

    Raises:
        ConfigError: If one runs.
    """
    for job in client.list_jobs():
        if (job.metadata or {}).get("job_name") == name and not job.status.is_terminal():
            raise ConfigError(f"--name={name}: job {job.submission_id} of that name runs: cancel it, or give another.")
