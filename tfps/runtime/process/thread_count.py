"""Compute how many threads this task's TensorFlow may use: its share of the machine's cores.

By default every TensorFlow process uses all cores. Tasks that share a machine then wait for each other's threads,
because each operation is split into parts for threads that do not run.
"""

import os
from pathlib import Path

from tfps.cluster.addresses import split
from tfps.cluster.spec import Cluster, Task

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return how many cores this process may use, given its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit: "max 100000"
        return count


def pool_sizes(cluster: Cluster, task: Task, overlap: bool) -> tuple[int, int]:
    """Return a task's intra-op and inter-op thread counts; 0, TensorFlow's own choice, for one that the user set.

    Tasks with the same host name share its cores evenly. If steps ``overlap``, as in async, there are at least two
    inter-op threads: one works while the other waits for it.
    """
    host = split(cluster.address(task))[0]
    neighbors = sum(split(cluster.address(other))[0] == host for other in cluster.tasks())
    count = max(1, cores() // neighbors)
    intra = 0 if os.environ.get("TF_NUM_INTRAOP_THREADS") else count
    inter = 0 if os.environ.get("TF_NUM_INTEROP_THREADS") else max(2 if overlap else 1, count)
    return intra, inter
