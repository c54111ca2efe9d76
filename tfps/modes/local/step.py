"""Local SGD: each worker trains on its own copy of the variables, and the copies are averaged every k steps.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data" (FedAvg); Stich 2019,
"Local SGD Converges Fast and Communicates Little". With k = ``--sync_every``, one *round* is::

    w_i = w                                       worker i copies the variables
    repeat k times: w_i = one step of the model's optimizer on a batch of worker i
    w = step of the server optimizer with the gradient  sum_i n_i (w - w_i) / sum_i n_i       n_i: examples of worker i

With ``--server_optimizer=sgd`` and a rate of 1, the new w is the mean of the w_i. The protocol:

Worker
    1. It copies the variables from the PS, and keeps w beside w_i. (Steps 2 and 3 need no PS.)
    2. It takes steps on its copies: of the parameters, of the optimizer's slots, of ``global_step``, and of what the
       model itself changes. It counts its examples.
    3. After k steps, or at ``--max_steps``, or when its input has ended, it goes on with 4.
    4. It pushes n_i and n_i (w - w_i) as ``sync`` pushes gradients, and takes a token.
    5. It continues with 1, but keeps its copies of the slots. When its input has ended, it closes the queues instead:
       the round that has just ended is the last.

Chief, in the background
    6. When the changes of all workers are there, it applies them on the PS, raises ``global_step`` by the most steps
       that a worker has taken in the round (k, unless all inputs have ended), and hands out tokens. This is the update
       of ``sync``, with rounds in place of steps.

All that ``sync`` does when a worker or the chief is lost holds here for rounds: the workers restart together, from w.

Floats that the model itself changes, such as the averages of batch norm, become the mean of the workers' values, too.
Other state that it changes, such as counters, is the chief's. The slots stay with each worker; the chief writes its own
to the PS before it saves, as they were when its round began, and a worker that joins begins with these. If the workers
take a round again, each goes back to its own slots of that time. States of random generators stay on the PS.

With ``--local_epochs``, k is instead the number of steps that a worker takes to pass over its own share of the examples
so often, so workers with larger shares take more. ``global_step`` rises by the most that one has taken. McMahan et al.
call ``--local_epochs`` E, ``--batch_size`` B, and ``--worker_fraction`` C.

With ``--worker_fraction``, a seeded sample of m workers trains in each round. The others push n_i = 0 and nothing else,
and take the token. The chief waits for the n_i of all workers and the changes of m. A worker copies the variables when
it has joined, and before a round for which it is drawn.
"""

import dataclasses
import functools

import tensorflow.compat.v1 as tf

from tfps.modes.base import ModeContext, Step, StepLimit
from tfps.modes.local import local_step, server_optimizer
from tfps.modes.local.exchange import Exchange
from tfps.modes.local.round import Round
from tfps.modes.sync import step as sync_step
from tfps.modes.sync.tokens import shared_variable
from tfps.tf_types import Operation, Optimizer, Tensor, Variable


def build(optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
    """Build one local step, and the exchange; see ``Mode.build_step``. Its tickets number the steps of this worker.

    Raises:
        ValueError: If the loss depends on no variable, or a variable is no resource variable.
    """
    own = local_step.build(optimizer, loss, global_step, context, Round)
    progress, taken = own.progress, own.taken
    exchange = Exchange(own.state, own.copies, progress, server_optimizer.make(context.config), context)
    with tf.device(global_step.device):
        counter = shared_variable("tfps/rounds")
        is_over = global_step.read_value() >= context.config.max_steps
    protocol = sync_step.of_gradients(
        exchange.pairs,
        sync_step.Updates(exchange.apply, counter, [counter.initializer, exchange.chief_init], exchange.collect),
        context,
    )
    renew = exchange.end_round(protocol.train_op)
    return dataclasses.replace(
        protocol,
        train_op=taken,
        draw=progress.tickets,
        draw_after=progress.tickets_after(taken),
        chief_init=_first(protocol, exchange),
        steps_taken=exchange.counts.steps(),
        rounds_made=exchange.counts.rounds(),
        give_back=functools.partial(_end, protocol, renew),
        worker_init=exchange.begin(after=[protocol.worker_init]),
        read_barrier=(),
        hold=None,
        ended=protocol.ended | is_over,
        limit=StepLimit(progress.allowed(), most=progress.steps, renew=renew, ends_rounds=True),
        copies=own.copies,
        kept_slots=own.state.slots,
        before_save=exchange.stored(counter) if context.task.is_chief else None,
    )


def _first(protocol: Step, exchange: Exchange) -> Operation:
    """Return ``Step.chief_init``."""
    counts = [exchange.counts.begin(protocol.recovery.generation)] if protocol.recovery else []
    return tf.group(protocol.chief_init, *counts)


def _end(protocol: Step, renew: Operation, count: int) -> Operation:
    """Return an operation that ends the round, and then training."""
    with tf.control_dependencies([renew]):
        return protocol.give_back(count)
