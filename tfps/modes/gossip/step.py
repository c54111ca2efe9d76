"""Gossip: each worker takes the weighted mean of its neighbors' copies, and applies its own gradient.

This is D-PSGD (Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?"). In a step, worker
i with the copy x_i makes::

    g_i = gradient(loss, x_i, batch of worker i)
    x_i = sum over j of W_ij x_j                 of its neighbors j, and itself
    x_i = one step of the model's optimizer with g_i

W comes from ``--topology`` (``gossip.topology``). There are no PS. The chief holds the variables and the job's state.
The variables are the *mean of all workers' copies*, as it was after the last multiple of ``--collect_every`` steps, and
after the last step. This mean is what is saved, exported and evaluated. Every worker, the chief too, trains on copies:
of the parameters, the optimizer's slots, ``global_step``, and what the model itself changes. The protocol:

Each worker
    1. It copies the variables from the chief, empties its queues, and goes on with 5, though it has taken no step: when
       the others have done so, too, all are ready to receive.
    2. It computes its gradient at its copy, and checks that it is finite. Then it sends its copy to its neighbors.
    3. When it has the copies of its neighbors for the same step, it takes the weighted mean.
    4. It applies its gradient, and the step ends when all that it sends has arrived. It continues with 2.
    5. After ``--collect_every`` steps, or at ``--max_steps``, it sends its copies and slots to the chief as a worker of
       ``sync`` sends gradients, and waits for a token. It continues with 2, with its own copies.
    6. When its input has ended, it tells its neighbors that it takes no part in the steps that are left until 5. They
       take their own copy in place of its. It goes on with 5, and closes the queues of the tokens.

Chief, in the background
    7. When the copies of all are there, all of the same step, it takes their mean, raises ``global_step``, and hands
       out tokens. This is the update of ``sync``, with copies in place of gradients. If a worker has taken fewer steps
       than others, its input has ended, and the mean is the last one: no worker takes a step after it. They all wait
       for another token, and find the queues closed.

When a worker is lost, its neighbors get an error or wait, and then the others wait for them. Its replacement requests
a restart. All interrupt their runs, enter the next *generation* together, and begin with 1, from the last mean. What
another generation has sent does not arrive (``gossip.links``). If the chief is lost, the job restarts from its
checkpoint.

The slots are not mixed, as in the paper. Floats that the model itself changes, such as the averages of batch norm, stay
with each worker, too. All of these become their mean in 7. Other state, such as counters, is the chief's. A worker
begins with the means in 1. States of random generators stay on the chief. Sparse gradients are applied as they are, but
whole tables are mixed.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext, Step, StepLimit
from tfps.modes.copies import WorkerCopies
from tfps.modes.gossip import topology
from tfps.modes.gossip.collection import Collection, Period
from tfps.modes.gossip.mixing import Mixing
from tfps.modes.gossip.mode import collect_every
from tfps.modes.local.state import State
from tfps.modes.sync import step as sync_step
from tfps.modes.sync.accumulators import copied, values_of
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.update_ops import ancestors, let_wait
from tfps.runtime.graph.graph_editor import can_wait, is_handle
from tfps.tf_types import Fetch, Gradient, Operation, Optimizer, Tensor, Variable

_UNBOUND = (
    "the optimizer uses a variable in {}, a branch or a loop, before it has the gradients: with --mode=gossip, an "
    "update must begin with them. Use --mode=sync."
)


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one step, and the mean of all; see ``Mode.build_step``. Its tickets number the steps of this worker.

    Raises:
        ValueError: If the loss depends on no variable, or a variable is no resource variable or has no known shape.
    """
    return _Builder(optimizer, loss, global_step, context).step()


class _Builder:
    """Builds the step of one worker."""

    def __init__(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> None:
        self._context, self._global_step = context, global_step
        known = tf.global_variables()
        pairs = sync_step.gradients(optimizer, loss)
        trained = list({variable.ref(): variable for _, variable in pairs}.values())
        graph = topology.neighbors(context.config.topology or topology.DEFAULT, context.cluster.num_workers)
        self._neighbors = sorted(graph[context.task.index])
        self._mixing = Mixing(trained, context.task.index, topology.weights(graph, context.task.index))
        mixed, sent = self._mixing.build(global_step.read_value(), [values_of(gradient).op for gradient, _ in pairs])
        applied = self._apply(optimizer, pairs, mixed)
        state = State.of(tf.get_default_graph(), trained, known, global_step)
        self._copies = WorkerCopies(state.all, context.task.device)
        self._period = Period(self._copies, global_step, context, self._mixing.links)
        self._collection = Collection(state, self._copies, self._period, context)
        with tf.control_dependencies([applied, *mixed, *sent]):
            self._taken = tf.group(global_step.assign_add(1, read_value=False), self._period.count_examples())
        with tf.device(global_step.device):
            self._counter, self._generation = (shared_variable(f"tfps/gossip/{name}") for name in ("means", "present"))
            self._is_over = global_step.read_value() >= context.config.max_steps

    def _apply(
        self, optimizer: Optimizer, pairs: Sequence[tuple[Gradient, Variable]], mixed: Sequence[Operation]
    ) -> Fetch:
        """Apply the gradients to the mix. No operation of the optimizer uses a variable before.

        Raises:
            ValueError: If one may do so: nothing in a branch or a loop waits for another operation.
        """
        with tf.control_dependencies(mixed), tf.device(self._context.task.device):
            late = [(copied(gradient), variable) for gradient, variable in pairs] if mixed else pairs
        known = set(tf.get_default_graph().get_operations())
        applied = optimizer.apply_gradients(late, self._global_step)
        uses = [op for op in ancestors([_op(applied)]) if op not in known and _uses_variable(op)]
        let_wait([op for op in uses if can_wait(op)], mixed)
        if early := next((op for op in uses if not set(mixed).issubset(ancestors([op]))), None):
            raise ValueError(_UNBOUND.format(early.name))
        return applied

    def step(self) -> Step:
        """Return the step."""
        collection, period = self._collection, self._period
        updates = sync_step.Updates(collection.apply, self._counter, [self._counter.initializer, collection.chief_init])
        protocol = sync_step.of_gradients(collection.pairs, updates, self._context)
        renew = collection.end(protocol.train_op)
        return dataclasses.replace(
            protocol,
            train_op=self._taken,
            draw=period.tickets,
            draw_after=period.tickets_after(self._taken),
            give_back=lambda count: self._end(protocol, renew, count),
            chief_init=self._chief_init(protocol),
            worker_init=self._join(protocol),
            read_barrier=(self._taken,),
            steps_taken=collection.counts.steps(),
            hold=None,
            ended=protocol.ended | self._is_over,
            limit=StepLimit(period.allowed(), most=collect_every(self._context.config), renew=renew, ends_rounds=True),
            copies=self._copies,
            rounds_made=collection.counts.rounds(),
            calls_workers=self._neighbors,
        )

    def _chief_init(self, protocol: Step) -> Operation:
        """Return an operation with which the chief begins a generation."""
        if protocol.recovery is None:
            raise ValueError("the protocol of sync has no generations")
        generation = protocol.recovery.generation
        present = self._generation.assign(generation, read_value=False)
        return tf.group(protocol.chief_init, present, self._collection.counts.begin(generation))

    def _join(self, protocol: Step) -> Operation:
        """Return an operation with which the worker begins, and begins again in a new generation."""
        begun = self._mixing.links.begin(self._generation.read_value())
        return self._collection.join([protocol.worker_init, begun])

    def _end(self, protocol: Step, renew: Operation, count: int) -> Operation:
        """Return an operation that takes no part in further steps, and ends training with the next mean."""
        none = self._mixing.links.send_none(self._copies.read(self._global_step), self._period.allowed())
        with tf.control_dependencies([renew, none]):
            return protocol.give_back(count)


def _uses_variable(op: Operation) -> bool:
    return op.type != "VarHandleOp" and any(map(is_handle, op.inputs))


def _op(fetch: Fetch) -> Operation:
    return fetch if isinstance(fetch, tf.Operation) else fetch.op
