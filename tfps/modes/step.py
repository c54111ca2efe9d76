"""What a mode gives to the training loop. Does not import TensorFlow.

The loop knows nothing of modes. It holds a ticket, an integer; while the ticket is below ``max_steps`` it runs
``train_op`` and gets its next ticket from the same run::

    ticket = run(first_ticket)
    while ticket < max_steps:
        ticket = run([train_op, next_ticket])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """The operations of one mode in one worker's graph.

    Attributes:
        train_op: Operation; one step: read the parameters, compute gradients, hand them over.
        first_ticket: Scalar int64 tensor, run once before the first step.
        next_ticket: Scalar int64 tensor, fetched together with ``train_op``.
        chief_init: Operation that the chief runs once, when the variables have their values and before any worker
            takes a step.
        worker_init: Operation that every worker runs once, before its first step.
        queue_runners: ``tf.compat.v1.train.QueueRunner`` that the chief keeps running in the background.
        redraw: Scalar int64 tensor, fetched instead of ``next_ticket`` when that is the ticket the worker had already:
            puts it back and draws another one. ``None`` in a mode whose tickets never repeat.
        give_back: Operation run by a worker whose input has ended, with a ticket in its hand.
        chief_can_finish: Whether the chief alone can take the steps that lost workers left undone.
    """

    train_op: Any
    first_ticket: Any
    next_ticket: Any
    chief_init: Any
    worker_init: Any
    queue_runners: Sequence[Any]
    redraw: Any
    give_back: Any
    chief_can_finish: bool
