"""All-reduce: workers add up their gradients in a ring, and each makes the same update to its own copy.

For N workers, with gradients g_i of the same parameters w::

    g = (g_1 + ... + g_N) / N          in a ring (``ring.ring``), with the same bits on each worker
    w = one step of the model's optimizer with g, on each worker

This is the update of ``sync`` (Chen et al. 2016) by other means: the ring of Patarasuk and Yuan 2009, as in Horovod
(Sergeev and Del Balso 2018). There are no PS. The chief holds the variables and the job's state, and works on the
variables themselves. Every other worker has copies: of the parameters, the optimizer's slots, ``global_step``, and what
the model itself changes. The protocol:

Each worker
    1. It empties its queues and, unless it is the chief, copies all values from the chief. Then it waits until all have
       done so (``ring.start``).
    2. It computes its gradient, and checks that it is finite. It tells the chief that it has it, for the report.
    3. It takes part in the ring until it has the mean, and all that it sends has arrived.
    4. It applies the mean, makes the model's own changes, and raises its ``global_step``. It continues with 2.
    5. When its input has ended, it closes the queues of the next worker. That one finishes the step before, finds them
       closed, and does the same. So all end after the same step.
    6. After ``--max_steps``, it waits until the chief has taken the last step, too.

Chief
    7. Between 3 and 4, it counts the update in ``begun``, unless its generation is over, and after 4 in ``ended``. If
       the run is interrupted between, because the next worker is lost, the variables are of two steps. Then the two
       counts differ when the workers meet, and the job restarts from its checkpoint.
    8. A chief that has to stop while its step waits for others saves meanwhile. First it raises ``paused``. An update
       looks at it after it is counted in ``begun``. So either the save waits for the update, or the update fails.

When a worker is lost, the one before it in the ring gets an error, and the others wait. Its replacement requests a
restart. Then all interrupt their runs, enter the next *generation* together, and begin with 1, at the step of the
chief. A worker may have been one step ahead of it, and takes that step again. What another generation has sent does not
arrive (``ring.ring``).

The model's own changes are made by each worker, after the mean is there, so all copies stay equal if the changes do not
depend on the batch. Those that do, such as the averages of batch norm, are saved from the chief, as in ``sync``. If the
step uses what such a change has left, the model is refused: no worker would compute what another does. A random
generator's state stays on the chief.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.base import Copy, ModeContext, Step
from tfps.modes.copies import WorkerCopies
from tfps.modes.local.state import State
from tfps.modes.recovery import Pause, SyncRecovery
from tfps.modes.ring import gradients
from tfps.modes.ring.own_changes import OwnChanges
from tfps.modes.ring.ring import Ring
from tfps.modes.ring.sameness import Sameness
from tfps.modes.ring.start import Start
from tfps.modes.sync import step as sync_step
from tfps.modes.sync.accumulators import copied, values_of
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates.update_ops import ancestors, is_writer, leaves, let_wait
from tfps.modes.worker_queues import check, device_of, on
from tfps.runtime.graph.graph_editor import can_wait
from tfps.tf_types import Fetch, Gradient, Operation, Optimizer, Tensor, Variable

_UNBOUND = (
    "the optimizer changes something in {}, a branch or a loop, before it has the gradients: with --mode=allreduce, an "
    "update must begin with them. Use --mode=sync."
)


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one step; see ``Mode.build_step``. Its tickets number the steps, which all workers take together.

    Raises:
        ValueError: If the loss depends on no variable, or a variable is no resource variable or has no known shape.
    """
    return _Builder(optimizer, loss, global_step, context).step()


class _Builder:
    """Builds the step of one worker."""

    def __init__(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> None:
        self._context, self._global_step = context, global_step
        self._is_alone, self._is_chief = context.cluster.num_workers == 1, context.task.is_chief
        self._device = device_of(context.task.index)
        known = tf.global_variables()
        pairs = sync_step.gradients(optimizer, loss)
        self._ring = Ring(context.cluster.num_workers, context.task.index, global_step.read_value())
        mean = gradients.mean(pairs, self._ring)
        with tf.device(global_step.device):
            self._start = Start(self._ring, context)
            self._begun, self._ended = shared_variable("tfps/ring/begun"), shared_variable("tfps/ring/ended")
            self._paused = shared_variable("tfps/ring/paused")
            self._pushed = [
                shared_variable(f"tfps/ring/pushed_{index}") for index in range(context.cluster.num_workers)
            ]
            self._is_over = (global_step.read_value() >= context.config.max_steps) | self._start.joined.is_closed()
        self._certain = self._begin_update([values_of(gradient).op for gradient, _ in mean])
        mean = [(self._after_begin(gradient), variable) for gradient, variable in mean]
        applied = self._apply(optimizer, mean)
        self._state = State.of(tf.get_default_graph(), [variable for _, variable in pairs], known, global_step)
        copies = None if self._is_chief else WorkerCopies(self._state.all, self._device, shared=self._pushed)
        self._copies = copies
        self._taken = self._count(pairs, applied)
        saved = {variable.ref() for variable in known}
        own = [variable for variable in self._state.all if variable.ref() in saved and variable is not global_step]
        self._changes = OwnChanges(own, [*self._ring.sent, *self._certain.control_inputs], applied)
        self._sameness = Sameness(self._state.all, [op for gradient, _ in mean for op in _parts(gradient)], applied)

    def step(self) -> Step:
        """Return the step."""
        start = self._start
        return Step(
            train_op=self._taken,
            draw=self._tickets,
            draw_after=self._draw_after,
            give_back=lambda _count: self._end_input(),
            chief_init=self._chief_init(),
            worker_init=self._worker_init(),
            read_barrier=leaves(self._taken),  # the packed wire may leave out the group itself
            hold=self._hold,
            recovery=self._recovery(),
            updates_ahead=tf.stack([one.read_value() for one in self._pushed]) - self._global_step.read_value(),
            ended=self._is_over,
            pause=Pause(*(self._paused.assign(one, read_value=False) for one in (1, 0))),
            limit=None if self._is_alone else start.limit(),
            copies=self._copies,
            calls_workers=[] if self._is_alone else [self._ring.next],
            end=self._end_update if self._is_chief else None,
            finish=self._check if self._is_chief and not self._is_alone else None,
        )

    def _check(self) -> None:
        """Check that all copies stay equal."""
        self._changes.check()
        self._sameness.check()

    def _begin_update(self, mean: Sequence[Operation]) -> Operation:
        """Return an operation after which the update changes variables: the worker has the mean, and all was sent."""
        with tf.control_dependencies([*mean, *self._ring.sent]):
            if not self._is_chief:
                with on(self._device):
                    return tf.no_op("tfps/ring/certain")
            present = self._start.is_present(self._ring.tag[0])
        with on(self._begun.device):
            with tf.control_dependencies([present]):
                begun = self._begun.assign_add(1, read_value=False)
            with tf.control_dependencies([begun]):
                return check(tf.equal(self._paused.read_value(), 0))

    def _hold(self, changes: Sequence[Operation]) -> Operation:
        """Make the update wait for the model's own changes that see what it changes; see ``Step.hold``."""
        let_wait(self._applying, changes)
        return self._certain

    def _end_update(self, done: Sequence[Operation]) -> Operation:
        """Return an operation that counts an update when all that belongs to it is done."""
        with tf.control_dependencies(done), on(self._ended.device):
            return self._ended.assign_add(1, read_value=False)

    def _after_begin(self, gradient: Gradient) -> Gradient:
        """Return a gradient that is there when the update has begun."""
        with tf.control_dependencies([self._certain]), on(self._device):
            return copied(gradient)

    def _apply(self, optimizer: Optimizer, mean: gradients.Pairs) -> Fetch:
        """Apply the mean. No operation of the optimizer changes anything before the update has begun.

        Raises:
            ValueError: If one may do so: nothing in a branch or a loop waits for another operation.
        """
        known = set(tf.get_default_graph().get_operations())
        applied = optimizer.apply_gradients(mean, self._global_step)
        made = [op for op in ancestors([_op(applied)]) if op not in known and is_writer(op)]
        self._applying = [op for op in made if can_wait(op)]
        let_wait(self._applying, [self._certain])
        if early := next((op for op in made if self._certain not in ancestors([op])), None):
            raise ValueError(_UNBOUND.format(early.name))
        return applied

    def _count(self, pairs: gradients.Pairs, applied: Fetch) -> Operation:
        """Return an operation that counts a step when it has been applied, and its gradient when that is there."""
        with tf.control_dependencies([applied]):
            raised = self._global_step.assign_add(1, read_value=False)
        self._applying.append(raised)
        with tf.control_dependencies([values_of(gradient).op for gradient, _ in pairs]):
            noted = self._pushed[self._context.task.index].assign(self._ring.tag[1] + 1, read_value=False)
        return tf.group(raised, noted)

    def _reached(self) -> Tensor:
        """Add a read of the step that this worker has come to."""
        return self._copies.read(self._global_step) if self._copies else self._global_step.read_value()

    def _tickets(self, count: int, pending: int = 0) -> Tensor:
        reached = self._reached()
        with on(self._device):
            return reached + tf.range(pending, pending + count, dtype=tf.int64)

    def _draw_after(self, count: int, copy: Copy) -> Tensor:
        done = [copy(op) for op in leaves(self._taken)]
        allowed = [] if self._is_alone else [self._start.allowed(done)[None]]
        with tf.control_dependencies(done):
            tickets = self._tickets(count)
        with on(self._device):
            return tf.concat([*allowed, tickets], axis=0)

    def _end_input(self) -> Operation:
        """Return an operation that ends training for all, after the step that this worker has taken last."""
        with tf.control_dependencies([self._start.is_present(self._ring.generation())]):
            passed_on = [] if self._is_alone else [self._ring.close()]
        with tf.control_dependencies(passed_on):  # before: to close what another has closed is an error
            return self._start.joined.close()

    def _chief_init(self) -> Operation:
        generation = self._generation = tf.placeholder(tf.int64, [], name="tfps/present_generation")
        return tf.group(
            self._start.generation.assign(generation, read_value=False),
            self._begun.assign(0, read_value=False),
            self._ended.assign(0, read_value=False),
            self._paused.assign(0, read_value=False),
        )

    def _worker_init(self) -> Operation:
        pushed = self._pushed[self._context.task.index].assign(self._global_step.read_value(), read_value=False)
        pulled = [self._copies.pull(self._state.all)] if self._copies else []
        return tf.group(pushed, self._start.join([pushed, *pulled]))

    def _recovery(self) -> SyncRecovery:
        queues = self._start.queues
        with tf.device(self._global_step.device):
            return SyncRecovery(
                generation=self._generation,
                counts=tf.stack([tf.cast(queue.size(), tf.int64) for queue in queues]),
                unblock=[queue.enqueue(tf.constant(-1, tf.int64)) for queue in queues],
                unblock_count=len(queues) + 1,
                clear=[queue.dequeue().op for queue in queues],
                partially_applied=tf.not_equal(self._begun.read_value(), self._ended.read_value()),
            )


def _parts(gradient: Gradient) -> Sequence[Operation]:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return [gradient.values.op, gradient.indices.op] if is_sparse else [gradient.op]


def _op(fetch: Fetch) -> Operation:
    return fetch if isinstance(fetch, tf.Operation) else fetch.op
