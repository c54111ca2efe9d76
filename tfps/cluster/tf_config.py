"""Read TF_CONFIG, the variable in which a platform gives a task its cluster, and report all problems together.

Follows ``tf.distribute.cluster_resolver.TFConfigClusterResolver`` and Kubeflow's TFJob. Must not import TensorFlow.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tfps.cluster.addresses import check_hosts, first_few
from tfps.cluster.cluster_resolver import ClusterResolver, PartialSpec
from tfps.text import did_you_mean, show

CHIEFS = ("chief", "master")  # the new and the old name of worker 0
_TF_JOBS = (*CHIEFS, "worker", "ps", "evaluator")


_PLACES = {
    "ps_hosts": "cluster.ps",
    "worker_hosts": "cluster.worker",
    "job_name": "task.type",
    "task_index": "task.index",
}
_SPARSE = " (a TFJob with enableDynamicWorker: true hides the workers from a ps: set it to false)"


class TfConfigResolver(ClusterResolver):
    """Reads TF_CONFIG; flags complete it."""

    source = "TF_CONFIG"
    variable = "TF_CONFIG"
    hint = "set TF_CONFIG (as Kubeflow does, except for a job of one task)"

    def is_present(self, env: Mapping[str, str]) -> bool:
        """Return whether TF_CONFIG has content: some platforms set it empty."""
        return "".join(env.get(self.variable, "").split()) not in ("", "{}")

    def resolve(
        self, env: Mapping[str, str], flags: PartialSpec, num_ps: int | None, problems: list[str]
    ) -> PartialSpec:
        """Return what TF_CONFIG gives."""
        del flags, num_ps  # TF_CONFIG tells a PS from a worker
        found: list[str] = []
        given = read(env[self.variable], found)
        problems += found
        return dataclasses.replace(given, faulty=frozenset(name for name in _PLACES if _explains(found, name)))

    def place(self, name: str) -> str:
        """Return a value's place in TF_CONFIG."""
        return f"TF_CONFIG {_PLACES[name]}"

    def missing(self, name: str) -> str:
        """Return the message that TF_CONFIG lacks a value."""
        return f"TF_CONFIG has no {_PLACES[name]}{_SPARSE if name == 'worker_hosts' else ''}"


def _explains(problems: Sequence[str], name: str) -> bool:
    """Return whether a problem is about the part of TF_CONFIG that has a value, or about all of it."""
    part = _PLACES[name].partition(".")[0]
    return any(problem.startswith(("TF_CONFIG is", "TF_CONFIG must", f"TF_CONFIG {part}")) for problem in problems)


def read(text: str, problems: list[str]) -> PartialSpec:
    """Parse the value of TF_CONFIG; ``problems`` gets a line for each problem with it."""
    config = _load(text, problems)
    if config.get("rpc_layer") not in (None, "", "grpc"):
        problems.append(f"TF_CONFIG rpc_layer is {_kind(config['rpc_layer'])}: tfps uses grpc; leave it out.")
    cluster = _object(config, "cluster", problems)
    hosts = _tf_hosts(cluster, problems)
    chiefs = hosts.get("chief") or hosts.get("master") or ()
    job, index, note = _tf_task(_object(config, "task", problems), cluster, len(chiefs), problems)
    workers = () if () in hosts.values() else chiefs + hosts.get("worker", ())
    return PartialSpec(hosts.get("ps") or None, workers or None, job, index, note, len(chiefs))


def _load(text: str, problems: list[str]) -> dict[str, Any]:
    repeated: dict[str, None] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.update((key, None) for key, n in Counter(key for key, _ in items).items() if n > 1)
        return dict(items)

    try:
        config = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        problems.append(f"TF_CONFIG is not JSON: {_json_error(error)}.")
        return {}
    problems += first_few([f"TF_CONFIG has the key {show(key)} twice: drop one." for key in repeated], "TF_CONFIG")
    if isinstance(config, dict):
        return config
    problems.append(f'TF_CONFIG must be an object like {{"cluster": ..., "task": ...}}, but is {_kind(config)}.')
    return {}


def _json_error(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return "it is nested too deeply or has a number that is too long; rewrite it"
    near = error.doc[error.pos : error.pos + 20]
    at = f"line {error.lineno} column {error.colno}, {f'before {show(near)}' if near else 'at its end'}"
    return f"{error.msg.lower()} ({at}); correct it there"


def _kind(value: object) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else show(json.dumps(value))


def _object(config: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        problems.append(f"TF_CONFIG {key} must be an object {{...}}, but is {_kind(value)}.")
    return value if isinstance(value, dict) else {}


def _tf_hosts(cluster: Mapping[str, Any], problems: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the addresses by job, without the evaluator's: some operators list it, but no task connects to it."""
    unknown = [f"TF_CONFIG cluster has {_unknown_job(job)}" for job in cluster if job not in _TF_JOBS]
    problems += first_few(unknown, "TF_CONFIG cluster")
    hosts = {job: _tf_list(job, cluster[job], problems) for job in _TF_JOBS[:-1] if cluster.get(job) not in (None, [])}
    if hosts.get("chief") and hosts.get("master"):
        problems.append("TF_CONFIG cluster has both a chief and a master, its old name: drop one.")
    for job in CHIEFS:
        if len(hosts.get(job, ())) > 1:
            problems.append(
                f"TF_CONFIG cluster.{job} has {len(hosts[job])} addresses: a job has one chief; drop the rest."
            )
    return hosts


def _unknown_job(job: object) -> str:
    hint = did_you_mean(job, _TF_JOBS) if isinstance(job, str) else ""
    return f"{_kind(job)}: it must be one of {', '.join(_TF_JOBS)}.{hint}"


def _tf_list(job: str, value: object, problems: list[str]) -> tuple[str, ...]:
    place = f"TF_CONFIG cluster.{job}"
    if isinstance(value, list) and all(isinstance(host, str) for host in value):
        return check_hosts(place, value, problems)
    if isinstance(value, dict):
        problems.append(
            f"{place} is an object, the sparse form, in which a task does not know all others: "
            "set enableDynamicWorker: false in the TFJob."
        )
    else:
        wrong = next((host for host in value if not isinstance(host, str)), None) if isinstance(value, list) else value
        problems.append(f'{place} must be a list of "host:port" strings, but has {_kind(wrong)}.')
    return ()


def _tf_task(
    task: Mapping[str, Any], cluster: Mapping[str, Any], chiefs: int, problems: list[str]
) -> tuple[str | None, int | None, str]:
    """Return the job and index as flag values, and TF_CONFIG's own name for the task if that differs."""
    job, index = task.get("type"), _tf_index(task.get("index"), problems)
    if job is not None and job not in _TF_JOBS:
        problems.append(f"TF_CONFIG task.type is {_unknown_job(job)}")
        return None, index, ""
    if job in _TF_JOBS[:-1] and cluster and not cluster.get(job):
        problems.append(f"TF_CONFIG task.type is {job}, but cluster.{job} is missing: add it or correct the type.")
        return None, None, ""
    if job in CHIEFS:
        if index:
            problems.append(f"TF_CONFIG task.index={index} is out of range for job '{job}', which has 1 task (0).")
        return "worker", None if index else index, f" ({job} 0)"
    if job == "worker" and chiefs and index is not None:
        return job, index + chiefs, f" (worker {index} after the chief)"
    return job, index, ""


def _tf_index(value: object, problems: list[str]) -> int | None:
    text = value if isinstance(value, str) else _kind(value)
    if re.fullmatch("[0-9]{1,19}", text):
        return int(text)
    if value is not None:
        problems.append(f"TF_CONFIG task.index is {_kind(value)}: it must be a whole number, from 0.")
    return None
