"""The variables on the PS that hold the job's state; ``job_state`` describes what they are for.

In a job without PS, the chief has the place of the only PS (``Cluster.state_tasks``).

They are in no collection, because they belong neither to the model nor to any checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster
from tfps.tf_types import Operation, Variable


def _variable(name: str, first: object) -> Variable:
    return tf.Variable(
        lambda: tf.constant(first), trainable=False, collections=[], use_resource=True, name=f"tfps/{name}"
    )


@dataclass(frozen=True)
class PsVariables:
    """The state held on one PS, as operations of one graph.

    Attributes:
        phase: int32 variable [num_workers]: RUNNING or another phase, or minus an exit code.
        joined: bool variable [num_workers]: which workers have joined.
        aborted: bool variable: whether the job has to restart.
        terms: string variable: the options that the PS was started with; see ``compatibility``.
    """

    phase: Variable
    joined: Variable
    aborted: Variable
    terms: Variable


@dataclass(frozen=True)
class FirstPsVariables:
    """The state that only PS 0 holds.

    Attributes:
        totals: float64 variable [num_workers, 5]: each worker's last ``WorkerTotals``, written together with its phase.
        beats: float64 variable [num_workers, 9]: each worker's last ``stragglers.WorkerPace``.
        generation: int64 variable: how often a worker has requested a restart of all.
        arrived: int64 variable [num_workers]: the generation in which each worker has arrived.
        released: int64 variable: the generation in which the chief lets all continue; -1 before the first.
        pulse: int64 variable [num_workers]: how many heartbeats each worker has sent, whatever it is doing.
        run: string variable: the identity of the run whose variables the PS hold, once they have values.
    """

    totals: Variable
    beats: Variable
    generation: Variable
    arrived: Variable
    released: Variable
    pulse: Variable
    run: Variable


def ps_variables(cluster: Cluster, index: int, terms: str = "") -> PsVariables:
    """Add the state of one PS to the default graph; only the PS itself passes its terms."""
    with tf.device(None), tf.device(cluster.state_devices[index]), tf.device("/cpu:0"):
        return PsVariables(
            phase=_variable(f"phase_{index}", np.zeros(cluster.num_workers, np.int32)),
            joined=_variable(f"joined_{index}", np.zeros(cluster.num_workers, np.bool_)),
            aborted=_variable(f"aborted_{index}", np.bool_(False)),
            terms=_variable(f"terms_{index}", terms),
        )


def every_ps_variables(cluster: Cluster) -> Sequence[PsVariables]:
    """Add the state of each PS to the default graph, for a worker."""
    return [ps_variables(cluster, index) for index in range(len(cluster.state_tasks))]


def first_ps_variables(cluster: Cluster) -> FirstPsVariables:
    """Add the state that only PS 0 holds to the default graph."""
    with tf.device(None), tf.device(cluster.state_devices[0]), tf.device("/cpu:0"):
        return FirstPsVariables(
            totals=_variable("totals", np.zeros([cluster.num_workers, 5], np.float64)),
            beats=_variable("beats", np.zeros([cluster.num_workers, 9], np.float64)),
            generation=_variable("generation", np.int64(0)),
            arrived=_variable("arrived", np.zeros(cluster.num_workers, np.int64)),
            released=_variable("released", np.int64(-1)),
            pulse=_variable("pulse", np.zeros(cluster.num_workers, np.int64)),
            run=_variable("run", ""),
        )


def all_variables(cluster: Cluster, index: int, terms: str) -> tuple[Operation, PsVariables]:
    """Add the whole state of a PS to the default graph.

    Returns:
        The operation that sets the state to its initial values, and the part of it that every PS holds.
    """
    state = ps_variables(cluster, index, terms)
    held = [*vars(state).values(), *(vars(first_ps_variables(cluster)).values() if index == 0 else [])]
    return tf.group(*(variable.initializer for variable in held)), state
