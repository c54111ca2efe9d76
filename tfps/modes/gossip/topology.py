"""Who mixes with whom, and with which weights. Does not import TensorFlow.

A worker's neighbors are, with

- ``ring``: the workers before and after it;
- ``complete``: all others;
- ``exponential``: those 1, 2, 4, ... places before and after it (Ying et al. 2021, "Exponential Graph is Provably
  Efficient for Decentralized Deep Training", here in both directions);
- edges, as of a file: those that an edge joins it with.

The weights are those of Metropolis and Hastings (Xiao, Boyd and Lall 2005, "A Scheme for Robust Distributed Sensor
Fusion Based on Average Consensus"). With d_i neighbors of worker i::

    W_ij = 1 / (1 + max(d_i, d_j))           for neighbors i and j
    W_ii = 1 - (sum of the W_ij of its neighbors)

W is symmetric, all rows and columns add up to 1, and W_ii > 0, so mixing keeps the mean of all copies and brings them
together on each connected graph. For ``ring`` all weights are 1/3, and for ``complete`` 1/N.
"""

from collections.abc import Mapping, Sequence

from tfps.config.topology import NAMES, edges_of, where

Neighbors = Sequence[frozenset[int]]

DEFAULT = "ring"


def neighbors(value: str, num_workers: int) -> Neighbors:
    """Return the neighbors of each worker.

    Args:
        value: The value of ``--topology``.
        num_workers: The number of workers. Edges with others are left out.
    """
    if value == "ring":
        hops = [1]
    elif value == "complete":
        hops = list(range(1, num_workers))
    elif value == "exponential":
        hops = [1 << power for power in range(num_workers.bit_length()) if 1 << power < num_workers]
    else:
        edges = [edge for edge in edges_of(value) if max(edge) < num_workers]
        return [frozenset(a + b - one for a, b in edges if one in (a, b)) for one in range(num_workers)]
    around = [[(one + way) % num_workers for hop in hops for way in (hop, -hop)] for one in range(num_workers)]
    return [frozenset(others) - {one} for one, others in enumerate(around)]


def weights(graph: Neighbors, worker: int) -> Mapping[int, float]:
    """Return the weight of each neighbor of a worker, by its index. The worker itself has the rest of 1."""
    return {one: 1 / (1 + max(len(graph[worker]), len(graph[one]))) for one in sorted(graph[worker])}


def problems(value: str, num_workers: int) -> Sequence[str]:
    """Return why a graph does not fit a job, one message each: flag, value, and how to fix it."""
    if value in NAMES:
        return []
    last = num_workers - 1
    for edge in edges_of(value):
        if max(edge) > last:
            given = f"{where(value, edge)} names worker {max(edge)}, but the workers are 0 to {last}"
            return [f"{given}: correct the edge, or give --num_workers={max(edge) + 1}."]
    found = _reached(neighbors(value, num_workers))
    apart = next((one for one in range(num_workers) if one not in found), None)
    if apart is None:
        return []
    return [f"{where(value)} is not connected: worker {apart} is not joined with worker 0. Add an edge, '0 {apart}'."]


def _reached(graph: Neighbors) -> set[int]:
    """Return the workers to which a path leads from worker 0."""
    found, todo = {0}, [0]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found
