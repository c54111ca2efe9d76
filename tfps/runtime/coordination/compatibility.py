"""Check that the tasks of a job have the same terms, however each of them was started.

A task with another mode, wire format or optimizer than the others builds another graph. The job would then hang, or
train something else without a message. So:

1. A PS writes its own terms, as JSON, next to the job's other state (``job_state.PsState.terms``).
2. A worker reads the terms of every PS before it joins one. If they differ from its own, it does not join. It exits
   with a list of all differences, or with a lost PS if that PS exits by then (it belonged to an earlier job).

The options that are terms have ``must_agree`` in their field of ``JobConfig``. Addresses are not terms: one host may
have many names, and ``probe`` has already checked which task is where. Options that may differ between tasks are not
terms either: paths, batch sizes, how often to save and to report. A PS writes the addresses of the workers beside its
terms, for ``duplicate_worker``.

A restarted chief finds its own mark on the PS (``job_state``). So does the chief of a new job that meets the PS of an
old one. But it comes from another ``--model_dir``, or from one that was emptied or has seen another run since:
``job.json`` there holds a run's id, and so does the PS. Does not import TensorFlow.
"""

import contextlib
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
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.errors import CheckpointError, ConfigError, ModelError, PeerLostError
from tfps.models import loader, static_check
from tfps.runtime.process import process_identity
from tfps.storage import JobDirectory, read_json

_EDITED = "it was edited in the meantime, or differs between hosts. Give every task the same file."
_POLL_SECS = 0.1

log = logging.getLogger(__name__)

_kept: dict[str, Mapping[str, str]] = {}  # by model: the hashes of its files when this process imported them

Terms = Mapping[str, Mapping[str, Any]]


def fingerprint(config: JobConfig, cluster: Cluster, tensorflow: str) -> str:
    """Return the terms of a task as JSON; ``tensorflow`` is that package's version."""
    shared = [name for name, option in OPTIONS.items() if option.must_agree]
    flags = {name: getattr(config, name) for name in shared} | {"model": os.path.basename(config.model)}
    sizes = {"ps_hosts": cluster.num_ps, "worker_hosts": cluster.num_workers}
    versions = {"tfps": tfps.__version__, "TensorFlow": tensorflow}
    files = files_of(config.model)
    return json.dumps({"flags": flags, "sizes": sizes, "versions": versions, "files": files})


def terms_of_ps(config: JobConfig, cluster: Cluster, tensorflow: str) -> str:
    """Return what a PS writes: its ``fingerprint``, when its process started, and where it reaches the workers."""
    terms = json.loads(fingerprint(config, cluster, tensorflow))
    return json.dumps({**terms, "began": process_identity.began(), "worker_hosts": cluster.workers})


def address_of(worker: Task, terms: str) -> str | None:
    """Return the address at which a PS with these terms reaches a worker; ``None`` if it has no such worker."""
    hosts = worker_hosts(terms)
    return hosts[worker.index] if worker.index < len(hosts) else None


def worker_hosts(terms: str) -> Sequence[str]:
    """Return the addresses at which a PS with these terms reaches the workers."""
    hosts: Sequence[str] = json.loads(terms).get("worker_hosts", ())  # a PS of another release has none
    return hosts


def keep_files(model: str) -> None:
    """Keep the hashes of a model's files. A worker does so before it imports them: they may be edited later."""
    _kept[model] = _files_now(model)


def files_of(model: str) -> Mapping[str, str]:
    """Return the hashes of a model's files that this process has kept, or else of the present ones, by their paths.

    That of the model's own file is under ``model``.
    """
    return _kept.get(model) or _files_now(model)


def _files_now(model: str) -> Mapping[str, str]:
    return {"model": digest(model), **_imported(model)}


def digest(model: str) -> str:
    """Return a hash of a model's file; empty for a built-in model, which is tfps's own, or if there is no such file."""
    source = _source(model)
    return _hash(source) if source else ""


def _source(model: str) -> Path | None:
    with contextlib.suppress(ModelError):
        return None if model in loader.BUILTIN else loader.find(model)
    return None


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _imported(model: str) -> Mapping[str, str]:
    """Return a hash of each file in a model's own directory that it imports, directly or not, by its path there.

    A module without a package has no directory of its own: it may be among all the packages that are installed.
    """
    source = _source(model)
    package = loader.package_of(model, source) if source else None
    if source is None or package is None:
        return {}
    folder, todo = source.parent, [source]
    for path in todo:  # grows during the loop
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            found = [folder / name for name in static_check.beside(path, folder, package)]
            todo += [file for one in found for file in _files(one) if file not in todo]
    return {str(file.relative_to(folder)): _hash(file) for file in todo[1:]}


def _files(path: Path) -> Sequence[Path]:
    """Return the Python files of a module or a package."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def check(mine: str, theirs: Sequence[str], cluster: Cluster) -> None:
    """Compare a worker's terms with those of every PS.

    Args:
        mine: The worker's terms, from ``fingerprint``.
        theirs: The terms of each PS.
        cluster: The cluster.

    Raises:
        ConfigError: If some terms differ; it has a line for each difference.
        PeerLostError: If some differ, but that PS has exited.
    """
    here = json.loads(mine)
    found: dict[tuple[str, str], list[Task]] = {}
    for index, terms in enumerate(theirs):
        for difference in differences(here, json.loads(terms)):
            found.setdefault(difference, []).append(cluster.state_tasks[index])
    if found:
        _wait_for_leaving(cluster, {ps for others in found.values() for ps in others})
        raise ConfigError([f"{what} on {_named(cluster, others)}: {fix}" for (what, fix), others in found.items()])
    versions = {json.loads(terms)["versions"]["TensorFlow"] for terms in theirs} - {here["versions"]["TensorFlow"]}
    if versions:
        log.info("TensorFlow %s here, %s on PS", here["versions"]["TensorFlow"], ", ".join(sorted(versions)))


def is_same(mine: str, theirs: str) -> bool:
    """Return whether a worker's terms equal those of a PS; ``theirs`` is empty if the PS has not set them yet."""
    return bool(theirs) and not differences(json.loads(mine), json.loads(theirs))


def began_within(terms: str, secs: float) -> bool:
    """Return whether the process of a PS started within the last ``secs``; False if it is on another machine."""
    return process_identity.secs_since(json.loads(terms)["began"]) < secs


def differences(mine: Terms, theirs: Terms) -> list[tuple[str, str]]:
    """Return how two tasks' terms differ, each as ``... here, ... there`` and how to fix it.

    TensorFlow versions may differ in their third part: TensorFlow itself documents those as compatible.
    """
    same, install = "give every task the same value.", "install the same version on every host."
    found = [(f"{_flag(name, a)} here, {_shown(b)}", same) for name, a, b in _unequal(mine, theirs, "flags")]
    found += [(f"--{name} has {a} here, {b}", same) for name, a, b in _unequal(mine, theirs, "sizes")]
    files = _unequal(mine, {"files": {}, **theirs}, "files") if "files" in mine else []
    named = mine["flags"].get("model")
    found += [(f"{_file(name, named)} here differs from the file", _EDITED) for name, a, b in files if a and b]
    packages = _unequal(mine, theirs, "versions")
    odd = [each for each in packages if each[0] != "TensorFlow" or _minor(each[1]) != _minor(each[2])]
    return found + [(f"{package} {a} here, {b}", install) for package, a, b in odd]


def _file(name: str, model: str | None) -> str:
    return f"--model={model}" if name == "model" else f"{name}, which --model={model} imports,"


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
    """Return the identity of a new run: an id, where its results go, when it started, and at which step."""
    place = os.path.abspath(model_dir) if model_dir else ""
    return {"id": uuid.uuid4().hex, "model_dir": place, "step": step, "began": process_identity.moment()}


def check_run(model_dir: str | None, identity: str, server: str, has_run: bool = True) -> None:
    """Check that the variables on the PS belong to the run that a chief continues.

    Args:
        model_dir: The chief's directory. Without its ``job.json``, only its path is compared.
        identity: The identity that the run's chief stored on the PS, as JSON; may be empty.
        server: The PS, as named in the message.
        has_run: Whether the directory may hold a run; one that was emptied is for a new run.

    Raises:
        ConfigError: If they belong to another run.
    """
    if not identity:
        return
    there = json.loads(identity)
    place = os.path.abspath(model_dir) if model_dir else ""
    if there["model_dir"] != place:
        why = f"with --model_dir={there['model_dir'] or 'none'}"
    elif place and not has_run:
        why = "of which nothing is left there"
    elif place and (_run_in(JobDirectory(place).job) or there["id"]) != there["id"]:
        why = "which started before this one"
    else:
        return
    raise ConfigError(
        f"--model_dir={model_dir or 'none'}: {server} belongs to another run, {why}: end the PS and restart them"
        + (", or give that directory." if there["model_dir"] not in ("", place) else ".")
    )


def _run_in(path: Path) -> str | None:
    """Return the id of the run in a ``job.json``; ``None`` if the file is lost or damaged."""
    try:
        return (read_json(path) or {}).get("run")
    except CheckpointError as error:
        log.warning("%s Training continues.", error)
        return None


def _wait_for_leaving(cluster: Cluster, others: set[Task]) -> None:
    """Wait for the PS of an earlier job to exit; raise if one does."""
    deadline = time.monotonic() + rendezvous.LEAVING_SECS
    while time.monotonic() < deadline:
        if gone := rendezvous.missing(cluster, sorted(others)):
            raise PeerLostError(
                f"{_named(cluster, gone)} belonged to an earlier job and has exited: restart this task."
            )
        time.sleep(_POLL_SECS)


def _named(cluster: Cluster, servers: Sequence[Task]) -> str:
    return rendezvous.first_few([f"{ps} ({cluster.address(ps)})" for ps in servers], most=1)
