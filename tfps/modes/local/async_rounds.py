"""Local SGD in which nobody waits: each worker brings what it has changed when its own round has ended.

Xie et al. 2019, "Asynchronous Federated Optimization" (FedAsync), has the server mix in the model of each worker when
it arrives. Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", has it apply the change of each
worker instead, as here. With N workers and k = ``--sync_every``, each worker repeats::

    w_i = v = w                                   worker i copies the variables, and keeps v
    repeat k times: w_i = one step of the model's optimizer on a batch of worker i
    w = step of the server optimizer with the gradient  (v - w_i) / N       w may have changed since

So with ``--server_optimizer=sgd`` and a rate of 1, N changes that begin at the same w move it to the mean of the w_i,
as a round of ``local`` does. No change is weighted by its age.

``global_step`` is the number of steps of all workers in the variables, divided by N. The PS of ``global_step`` counts
the steps of each worker that are *taken*, and those that it has been *granted* for its present round. The protocol:

Worker
    1. It is granted min(k, steps that nobody has taken or been granted, steps until ``--max_steps``) steps, under the
       lock of the PS. If that is 0, it is through.
    2. It copies the variables and ``global_step`` from the PS, and keeps v beside w_i.
    3. It takes the granted steps on its copies, without a PS.
    4. It sends (v - w_i) / N. Each PS applies its part under its lock (``atomic_update``). The PS of ``global_step``
       counts the steps as taken there, ends the grant, and raises ``global_step``. It continues with 1.
    5. When its input has ended, it ends its round with the steps that it has taken so far, and leaves.

Worker that is through, when no other one trains
    6. It raises the fence: an update that a lost worker still has on its way fails. It withdraws what lost workers
       have been granted, and continues with 1.

Worker that joins, at first or again
    7. It continues with 1. What it was granted before is granted no more.

So a lost, frozen or slow worker holds nobody, the steps of a round are in the variables all or none, and all workers
together take N ``--max_steps`` steps. Only if a worker is asked to stop just when it sends its round may there be a
round more. What a reader sees while updates go on is that of ``async``.

Floats that the model itself changes, such as the averages of batch norm, move to the worker's value by 1 / N of the
way; a value on the PS that is not finite becomes that of the worker. Other state that the model changes is the chief's,
and part of its updates. The slots stay with each worker; the chief writes its own to the PS before it saves.
"""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from tfps.modes import async_step
from tfps.modes.base import ModeContext, Step, StepLimit
from tfps.modes.copies import WorkerCopies
from tfps.modes.local import local_step, server_optimizer
from tfps.modes.local.grants import Grants
from tfps.modes.local.own_round import OwnRound
from tfps.modes.local.state import State
from tfps.modes.local_sgd import sync_every
from tfps.modes.recovery import Fence
from tfps.modes.sync.accumulators import sum_dtype
from tfps.modes.sync.tokens import shared_variable
from tfps.modes.updates import atomic_update
from tfps.modes.updates.moments import Moments
from tfps.tf_types import Gradient, Operation, Optimizer, Tensor, Variable


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one local step, and the exchange; see ``Mode.build_step``. Its tickets number the steps of this worker.

    Raises:
        ValueError: If the loss depends on no variable, or a variable is no resource variable.
    """
    own = local_step.build(optimizer, loss, global_step, context, OwnRound)
    return _Exchange(own.state, own.copies, own.progress, context).step(own.taken)


class _Exchange:
    """What a worker sends when its round ends, and takes when the next begins.

    Args:
        state: The variables.
        copies: The worker's copies of them.
        progress: The worker's round.
        context: The job and the worker.
    """

    def __init__(self, state: State, copies: WorkerCopies, progress: OwnRound, context: ModeContext) -> None:
        self._state, self._copies, self._round, self._context = state, copies, progress, context
        cluster, task, step = context.cluster, context.task, state.global_step
        self._worker, self._workers, self._is_chief = task.index, cluster.num_workers, task.is_chief
        self._base = WorkerCopies([*state.exchanged, *state.kept], task.device, "tfps/before")
        self._moments = Moments(cluster.num_ps, cluster.num_workers)
        self._grants = Grants(context.config, step, self._moments, task.index)
        with tf.device(step.device):
            self._rounds = shared_variable("tfps/rounds")
        with tf.device(None), tf.device(task.device):
            pairs = self._sent()
        self._server = server_optimizer.make(context.config)
        self._update = atomic_update.apply(self, pairs, self._rounds, self._moments, task.index)
        self._staleness, counted = async_step.count_staleness(
            progress.seen.read_value(), self._update.counted, self._rounds
        )
        self._ends = [counted, *self._update.others]

    def step(self, taken: Operation) -> Step:
        """Return the step of the mode.

        Args:
            taken: Takes one local step.
        """
        total, first = async_step.partial_updates(self._state.global_step)
        device, gone = self._update.device, tf.placeholder(tf.int64, [None], name="tfps/gone")
        admitted = tf.group(self._moments.settle(self._worker, device), self._moments.fence([self._worker], off=False))
        fenced = self._moments.fence(gone)
        return Step(
            train_op=taken,
            draw=self._round.tickets,
            draw_after=self._round.tickets_after(taken),
            give_back=lambda _count: tf.group(*self._ends),
            chief_init=self._chief_init(total, first),
            worker_init=self._begin([admitted]),
            fence=Fence(gone, self._grants.withdraw(gone, [fenced])),
            staleness=self._staleness.read_value(),
            any_worker_can_finish=True,
            steps_taken=self._grants.taken.read_value(),
            rounds_made=self._rounds.read_value(),
            moments=self._moments,
            partial=async_step.partial_of(self._moments, total, first, self._worker, device),
            limit=StepLimit(
                self._round.allowed(), most=sync_every(self._context.config), renew=self._end_round(), ends_rounds=True
            ),
            leave=self._grants.withdraw([self._worker]),
            rejoin=self._begin([]),
            copies=self._copies,
            kept_slots=self._state.slots,
            before_save=self._stored() if self._is_chief else None,
        )

    def _chief_init(self, total: Variable, first: Tensor) -> Operation:
        counts = [self._rounds.initializer, self._staleness.initializer, total.assign(first, read_value=False)]
        return tf.group(self._grants.reset(), *counts, self._moments.reset(range(self._workers)))

    def _sent(self) -> Sequence[tuple[Gradient, Variable]]:
        """Return what the worker sends when its round has at least one step, each with its variable."""
        steps = self._round.taken()
        changes = [self._change(one) for one in self._state.trained]
        checks = [
            tf.check_numerics(change, f"tfps: the change of {one.op.name} in a round").op
            for change, one in zip(changes, self._state.trained, strict=True)
            if not change.dtype.is_complex
        ]
        others = [*self._state.averaged, *(self._state.counted if self._is_chief else ())]
        with tf.control_dependencies([*checks, self._round.must_have_steps()]):
            sent = [*changes, *(self._copies.read(one) for one in others), steps]
            variables = [*self._state.trained, *others, self._grants.taken]
            return [(tf.identity(tensor), one) for tensor, one in zip(sent, variables, strict=True)]

    def _change(self, variable: Variable) -> Tensor:
        """Return a worker's share of the mean change of a variable."""
        before, now = (copies.read(variable) for copies in (self._base, self._copies))
        dtype = sum_dtype(before.dtype)
        change = tf.cast(before, dtype) - tf.cast(now, dtype)
        return tf.cast(change / self._workers, before.dtype)

    def apply_gradients(self, pairs: Sequence[tuple[Gradient, Variable]], _step: Variable) -> Operation:
        """Return an operation that applies what one worker has sent, and raises the global step."""
        sent = {variable.ref(): tensor for tensor, variable in pairs}
        applied = self._server.apply_gradients([(sent[one.ref()], one) for one in self._state.trained])
        averaged = [self._mixed(one, sent[one.ref()]) for one in self._state.averaged]
        kept = [one for one in self._state.counted if one.ref() in sent]
        counted = [one.assign(sent[one.ref()], read_value=False) for one in kept]
        return tf.group(applied, *averaged, *counted, self._grants.count(sent[self._grants.taken.ref()]))

    def _mixed(self, variable: Variable, value: Tensor) -> Operation:
        """Return an operation that moves a variable to a worker's value by one worker's part."""
        with tf.device(variable.device):
            now, dtype = variable.read_value(), sum_dtype(variable.dtype.base_dtype)
            mean = tf.cast(now, dtype) * (1 - 1 / self._workers) + tf.cast(value, dtype) / self._workers
            mixed = tf.where_v2(tf.math.is_finite(now), tf.cast(mean, variable.dtype.base_dtype), value)
            return variable.assign(mixed, read_value=False)

    def _begin(self, after: Sequence[Operation]) -> Operation:
        """Return an operation with which the worker begins after it has joined."""
        with tf.control_dependencies(after):
            fixed = self._copies.pull_once(self._state.fixed)
            kept = self._base.give_back(self._state.kept, self._copies, keep=tf.constant(False))
            return tf.group(fixed, kept, self._pulled([*after, kept]))

    def _end_round(self) -> Operation:
        """Return an operation that ends a round, and begins the next."""
        with tf.control_dependencies(self._ends):
            kept = [self._base.assign(one, self._copies.read(one)) for one in self._state.kept]
        return tf.group(self._pulled(self._ends), *kept)

    def _pulled(self, after: Sequence[Operation]) -> Operation:
        number, step = self._grants.draw(after)
        with tf.control_dependencies([number]):
            with tf.device(self._rounds.device):
                seen = self._rounds.read_value()
            with tf.control_dependencies([seen]):
                values = [(one, one.read_value()) for one in self._state.exchanged]
        pulled = [copies.assign(*pair) for pair in values for copies in (self._copies, self._base)]
        return tf.group(self._round.begin_granted(number, step, seen), *pulled)

    def _stored(self) -> Operation:
        """Return an operation that writes the chief's slots to the PS, as they were when its round began."""
        with tf.device(self._rounds.device):
            has_begun = self._rounds.read_value() > 0
        return self._base.push(self._state.slots, where=has_begun)
