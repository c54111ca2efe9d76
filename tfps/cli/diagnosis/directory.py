"""Check ``--model_dir``: whether it can be written, who holds it, and which hosts share it. No TensorFlow."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfps.cli.diagnosis import shared_dir, versions
from tfps.cli.diagnosis.check import NOT_YET, OK, WARNING, WRONG, Check
from tfps.cli.diagnosis.shared_dir import Presence, SharedDirProbe
from tfps.cluster import rendezvous
from tfps.cluster.addresses import normalized, split
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.errors import ClusterFormError, StorageError
from tfps.runtime.checkpoint import lock_holder
from tfps.runtime.coordination import compatibility
from tfps.text import show

STAY_SECS = 3.0  # so that doctors started together find each other
_CLOCK_SECS = 2.0
_LITTLE_BYTES = 10**9


def checks(config: JobConfig, members: Cluster, enough: threading.Event) -> list[Check]:
    """Check a job's directory, and stay there for some seconds or until ``enough`` is set."""
    model_dir = config.model_dir
    if not model_dir:
        return [Check(NOT_YET, "model_dir", "not given: the chief makes a new one in runs/, and begins at step 0")]
    here = versions.installed()
    try:
        with shared_dir.visit(Path(model_dir), here) as visit:
            others = visit.others()
            enough.wait(STAY_SECS)
            others |= visit.others()
            found = [_shared(here, others, members), _clocks(here["host"], visit, others)]
            return [_room(model_dir, visit), *_holder(model_dir, config.force), *found]
    except (OSError, StorageError) as error:
        return [Check(WRONG, "model_dir", str(error), StorageError.exit_code)]


def _room(model_dir: str, visit: SharedDirProbe) -> Check:
    finding = f"{show(model_dir)} is writable, {visit.free_bytes / 1e9:,.1f} GB free"
    full = Check(WARNING, "model_dir", f"{finding}: make room for checkpoints.")
    return full if visit.free_bytes < _LITTLE_BYTES else Check(OK, "model_dir", finding)


def _holder(model_dir: str, force: bool) -> Iterator[Check]:
    """Yield which job holds the directory, if there is one."""
    seen = lock_holder.look(model_dir)
    if seen is None or not lock_holder.is_known_to_live(model_dir, seen):
        return
    if force:
        yield Check(WARNING, "holder", f"held by {seen.holder}: --force takes it over and ends that job.")
    else:
        fix = "end that job first, or give another directory; --force takes it over and ends that job."
        yield Check(WRONG, "holder", f"held by {seen.holder}: {fix}", StorageError.exit_code)


def _shared(here: Mapping[str, str], others: Mapping[str, Presence], members: Cluster) -> Check:
    """Report which other hosts are in the directory, and whether they have the same versions."""
    if not others and all(split(normalized(members.address(task)))[0] == "localhost" for task in members.tasks()):
        return Check(OK, "shared", "all tasks are on this machine")
    if not others:
        return Check(NOT_YET, "shared", "no other host is there: start doctor on all hosts at the same time")
    hosts = {card.content.get("host", "?"): card.content for card in others.values()}
    odd = [f"{what} on {host}: {fix}" for host, there in hosts.items() for what, fix in _unlike(here, there)]
    if odd:
        return Check(WRONG, "shared", " ".join(odd), ClusterFormError.exit_code)
    finding = f"with {rendezvous.first_few(sorted(hosts))}, which have the same versions"
    num_hosts = len({split(members.address(task))[0] for task in members.tasks()})
    if (met := len({here["host"], *hosts})) < num_hosts:
        rest = f"these are {met} of {num_hosts} hosts: the others use another directory, or do not run doctor now"
        return Check(WARNING, "shared", f"{finding}; but {rest}")
    return Check(OK, "shared", finding)


def _unlike(here: Mapping[str, str], there: Mapping[str, str]) -> list[tuple[str, str]]:
    def terms(found: Mapping[str, str]) -> compatibility.Terms:
        return {"flags": {}, "sizes": {}, "versions": {name: found.get(name, "?") for name in ("tfps", "TensorFlow")}}

    return compatibility.differences(terms(here), terms(there))


def _clocks(host: str, visit: SharedDirProbe, others: Mapping[str, Presence]) -> Check:
    """Compare the clocks of the hosts with the file system's clock."""
    own = visit.own
    if own is None:
        raise StorageError("--model_dir: a file that was just written there cannot be read.")
    cards = {host: own, **{card.content.get("host", "?"): card for card in others.values()}}
    wrong = [
        f"{name} by {card.ahead_secs:+.1f} s" for name, card in cards.items() if abs(card.ahead_secs) > _CLOCK_SECS
    ]
    if wrong:
        finding = f"differ from the file system's: {rendezvous.first_few(wrong)}; set them with NTP."
        return Check(WARNING, "clocks", finding)
    return Check(OK, "clocks", f"{abs(own.ahead_secs):.1f} s from the file system's")
