"""What the tasks of a job have to agree on, however each was started.

A task that has another mode, wire or optimizer than the others builds another graph: the job would hang, or train
something else in silence. So:

1. A PS writes the terms it was started on, as JSON, beside the job's other state (``job_state.PsState.terms``).
2. A worker reads the terms of every PS before it joins one. Where they differ from its own it does not join: it ends
   with every difference told or, if that PS leaves meanwhile (it was of an earlier job), as one that lost it.

The addresses are no terms: one host may have many names, and who is where has been asked (``probe``). Neither is
what each task may have for itself: paths, batch sizes, how often to save and to report.

A chief that is started again finds its own mark on the PS (``job_state``). So does one of a new job that meets the PS
of an old one, but from another ``--model_dir``, or from one that has seen another run since: ``job.json`` there holds
a run's id, and so does the PS. Does not import TensorFlow.
"""

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tfps
from tfps.cluster import rendezvous
from tfps.cluster.resolver import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, ConfigError, PeerLostError
from tfps.report import JOB, read_json
from tfps.runtime.process import process_identity

_FLAGS = ("model", "optimizer", "learning_rate", "max_steps", "mode", "ps_strategy", "min_slice_mb", "wire")
_EDITED = "it was changed meanwhile, or is not the same on all hosts. Give every task the same."
_POLL_SECS = 0.1

log = logging.getLogger(__name__)

Terms = Mapping[str, Mapping[str, Any]]


def fingerprint(config: JobConfig, cluster: Cluster, tensorflow: str) -> str:
    """Return what a task of a job was started on, as JSON; ``tensorflow`` is that package's version."""
    flags = {name: getattr(config, name) for name in _FLAGS} | {"model": os.path.basename(config.model)}
    sizes = {"ps_hosts": cluster.num_ps, "worker_hosts": cluster.num_workers}
    versions = {"tfps": tfps.__version__, "TensorFlow": tensorflow}
    files = {"model": digest(config.model)}
    return json.dumps({"flags": flags, "sizes": sizes, "versions": versions, "files": files})


def digest(model: str) -> str:
    """Return what tells the file of a model from others; nothing of a module, or where there is no such file."""
    try:
        return hashlib.sha256(Path(model).read_bytes()).hexdigest() if model.endswith(".py") else ""
    except OSError:
        return ""


def check(mine: str, theirs: Sequence[str], cluster: Cluster) -> None:
    """Compare a worker's terms with those of every PS.

    Args:
        mine: As ``terms`` gives them.
        theirs: Those of each PS.
        cluster: The cluster.

    Raises:
        ConfigError: If some differ; a line for each difference.
        PeerLostError: If they do, but the PS has left.
    """
    here = json.loads(mine)
    found: dict[tuple[str, str], list[Task]] = {}
    for index, told in enumerate(theirs):
        for difference in differences(here, json.loads(told)):
            found.setdefault(difference, []).append(Task("ps", index))
    if found:
        _wait_for_leaving(cluster, {ps for others in found.values() for ps in others})
        raise ConfigError([f"{what} on {_named(cluster, others)}: {fix}" for (what, fix), others in found.items()])
    versions = {json.loads(told)["versions"]["TensorFlow"] for told in theirs} - {here["versions"]["TensorFlow"]}
    if versions:
        log.info("TensorFlow %s here, %s on PS", here["versions"]["TensorFlow"], ", ".join(sorted(versions)))


def is_same(mine: str, theirs: str) -> bool:
    """Return whether a worker's terms are a PS's; ``theirs`` is empty if it has not set them yet."""
    return bool(theirs) and not differences(json.loads(mine), json.loads(theirs))


def differences(mine: Terms, theirs: Terms) -> list[tuple[str, str]]:
    """Return how two tasks' terms differ: each as ``... here, ... there``, and what to do.

    TensorFlow may differ in the third part of its version: of those it says itself that they are compatible.
    """
    same, install = "give every task the same.", "install the same on every host."
    found = [(f"{_flag(name, a)} here, {_shown(b)}", same) for name, a, b in _unequal(mine, theirs, "flags")]
    found += [(f"--{name} has {a} here, {b}", same) for name, a, b in _unequal(mine, theirs, "sizes")]
    files = _unequal(mine, {"files": {}, **theirs}, "files") if "files" in mine else []
    named = mine["flags"].get("model")
    found += [(f"--{flag}={named} here is another file than", _EDITED) for flag, a, b in files if a and b]
    packages = _unequal(mine, theirs, "versions")
    odd = [each for each in packages if each[0] != "TensorFlow" or _minor(each[1]) != _minor(each[2])]
    return found + [(f"{package} {a} here, {b}", install) for package, a, b in odd]


def _unequal(mine: Terms, theirs: Terms, kind: str) -> list[tuple[str, Any, Any]]:
    return [
        (name, value, theirs[kind].get(name)) for name, value in mine[kind].items() if value != theirs[kind].get(name)
    ]


def _flag(name: str, value: Any) -> str:
    return f"no --{name}" if value is None else f"--{name}={_shown(value)}"


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def new_run(model_dir: str | None, step: int = 0) -> dict[str, Any]:
    """Return what tells a run from all others: an id, and where its results go; and when it began, at which step."""
    place = os.path.abspath(model_dir) if model_dir else ""
    return {"id": uuid.uuid4().hex, "model_dir": place, "step": step, "began": process_identity.moment()}


def check_run(model_dir: str | None, told: str, server: str) -> None:
    """Make sure that the variables on the PS are of the run that a chief goes on with.

    Args:
        model_dir: The chief's; without one, and where it was lost with its ``job.json``, nothing can be told.
        told: What that run's chief has left on the PS, as JSON; may be empty.
        server: The PS, for people.

    Raises:
        ConfigError: If they are of another run.
    """
    if not told or not model_dir:
        return
    there = json.loads(told)
    here = _run_in(Path(model_dir) / JOB) or there["id"]
    if there["model_dir"] != os.path.abspath(model_dir):
        why = f"with --model_dir={there['model_dir'] or 'none'}"
    elif here != there["id"]:
        why = "that was begun before this one"
    else:
        return
    raise ConfigError(
        f"--model_dir={model_dir}: {server} is of another run, {why}: end the PS and start them again"
        + (", or give that directory." if there["model_dir"] not in ("", os.path.abspath(model_dir)) else ".")
    )


def _run_in(path: Path) -> str | None:
    """Return the run that a ``job.json`` is of; ``None`` if it is lost, or damaged."""
    try:
        return (read_json(path) or {}).get("run")
    except CheckpointError as error:
        log.warning("%s Training goes on.", error)
        return None


def _wait_for_leaving(cluster: Cluster, others: set[Task]) -> None:
    """Give PS of an earlier job their time to leave; raises if one does."""
    deadline = time.monotonic() + rendezvous.LEAVING_SECS
    while time.monotonic() < deadline:
        if gone := rendezvous.missing(cluster, sorted(others)):
            raise PeerLostError(f"{_named(cluster, gone)} was of an earlier job, and has left: start this task again.")
        time.sleep(_POLL_SECS)


def _named(cluster: Cluster, servers: Sequence[Task]) -> str:
    return rendezvous.first_few([f"{ps} ({cluster.address(ps)})" for ps in servers], most=1)
