"""The position of a job in its ``Examples``.

``order`` says what a position is. An example counts as read when its gradient is in the parameters. The position is
a variable on the PS, and is saved with the others::

    [workers, batch size, seed, kind, epochs, step, count of example 0, count of example 1, ...]

How it follows the parameters depends on the mode:

1. Where each worker applies its own gradients (async, ssp), the update adds 1 to the counts of its batch, under the
   lock of the update. So a checkpoint has both or neither. ``workers`` is 0: the counts are what they say.
2. Where the workers train in step (sync, local), the step tells the position. The counts are those at ``step``, when
   the run began, and each step since has taken one batch of each worker. ``kind`` says from which share: ``KINDS``.

A worker looks up the position when it starts. What a lost pipeline had read ahead is read again. Where a worker is lost
in the second case, the job restarts from its checkpoint: an input cannot go back in the same process.
"""

import logging
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.data.dealer import Dealer
from tfps.data.epochs import Epochs, Turns
from tfps.data.hand import Hand
from tfps.data.order import PARTITIONS, Indices
from tfps.data.stream import Stream
from tfps.errors import ConfigError, PeerLostError
from tfps.text import plural
from tfps.tf_types import Operation, Session, Tensor, Variable

log = logging.getLogger(__name__)

NAME = "tfps/examples"
HEAD = 6
KINDS = (*PARTITIONS, "dynamic")
_SHARD_BATCHES = 8


class Position:
    """The position of a job in its examples, in the graph of one worker.

    Args:
        stream: The worker's batches.
        indices: The examples of a step's batch: int64 [batch].
        global_step: int64 resource variable.
        config: The job.
        workers: The number of workers.
        worker: The index of this one.
        in_step: Whether an update has one batch of each worker, so that the step tells the position.

    Attributes:
        hand: What this worker has of the shards that are dealt; ``None`` where none are.
    """

    def __init__(
        self,
        stream: Stream,
        indices: Tensor,
        global_step: Variable,
        config: JobConfig,
        workers: int,
        worker: int,
        in_step: bool,
    ) -> None:
        self._stream, self._indices, self._epochs = stream, indices, config.epochs
        self._num_workers = workers
        kind = KINDS.index("dynamic" if config.data_policy == "dynamic" else config.partition or PARTITIONS[0])
        self._own = [workers if in_step else 0, stream.batch_size, config.seed, kind, config.epochs or 0]
        with tf.device(global_step.device):
            self._variable = tf.Variable(
                lambda: tf.zeros([HEAD + stream.size], tf.int64), trainable=False, use_resource=True, name=NAME
            )
            self._value = tf.placeholder(tf.int64, [HEAD + stream.size], "tfps/examples_now")
            self._assign = self._variable.assign(self._value, read_value=False)
            self._now = self._variable.read_value(), global_step.read_value()
        self.hand: Hand | None = None
        if stream.is_dealt:
            self._dealer = Dealer(self._variable, HEAD, stream.size, workers, worker)
            self.hand = Hand(stream, self._dealer, config.epochs)

    def counted(self) -> Operation | None:
        """Add an operation to an update that counts its batch, and return it; ``None`` where the step tells."""
        if self._own[0]:
            return None
        with tf.device(self._variable.device):
            places = tf.identity(self._indices) + HEAD
            return self._variable.scatter_add(tf.IndexedSlices(tf.ones_like(places), places)).op

    def fenced(self, fence: Any) -> Any:
        """Return a mode's fence, ``modes.recovery.Fence`` or ``None``, after which others take what is dealt."""
        return self._dealer.fenced(fence) if self.hand and fence else fence

    def begin(self, session: Session) -> None:
        """Make the position of the variables that of a run that starts now; the chief does it before all others."""
        value, step = session.run(self._now)
        counts = self._counts(value, int(step))
        session.run(self._assign, {self._value: np.concatenate([[*self._own, step], counts])})
        if self.hand:
            fair = self._stream.size // (_SHARD_BATCHES * self._num_workers)
            self._dealer.begin(session, counts, max(1, min(_SHARD_BATCHES * self._stream.batch_size, fair)))

    def find(self, session: Session) -> None:
        """Let the worker's input begin at the present position, when it is initialized next.

        Raises:
            ConfigError: If the step tells the position, and workers differ in their batch size.
        """
        value, step = session.run(self._now)
        if self._own[0] and value[1] != self._own[1]:
            raise ConfigError(
                f"--batch_size={self._own[1]} (of all devices): the chief has {value[1]}, and with --data_policy in a "
                "mode whose workers train in step all must have the same: give it to all."
            )
        if self.hand:
            self.hand.join(session)
        else:
            self._stream.begin_at(self._counts(value, int(step)))

    def is_read(self, session: Session) -> bool:
        """Return whether each example has been read in each of ``--epochs``."""
        return self._epochs is not None and not self._unread(session)[0]

    def _unread(self, session: Session) -> tuple[int, int]:
        """Return how many examples are left to read before ``--epochs``, those of each epoch; and the step."""
        value, step = session.run(self._now)
        return int(np.maximum((self._epochs or 0) - self._counts(value, int(step)), 0).sum()), int(step)

    def report_end(self, session: Session, has_trained: bool) -> None:
        """Log that each example has been read in each of ``--epochs``.

        Raises:
            PeerLostError: If some are unread, because a worker was lost and not replaced.
        """
        (unread, step), epochs = self._unread(session), self._epochs or 0
        if unread:
            why = "a worker that had them is lost. The job restarts from its last checkpoint"
            raise PeerLostError(f"--epochs={epochs}: {plural(unread, 'example')} unread at step {step}: {why}.")
        if not has_trained:
            log.info("nothing to train: --epochs=%d is reached; raise it to continue", epochs)
        log.info("--epochs=%d: each example has been read %s, at step %d", epochs, plural(epochs, "time"), step)

    def _counts(self, value: Indices, step: int) -> Indices:
        """Return how often each example has been read by the updates in the variables."""
        workers, batch_size, seed, kind, epochs, first = map(int, value[:HEAD])
        counts, taken = value[HEAD:], step - first
        if not workers:
            return counts
        if KINDS[kind] != "dynamic":
            return self._stream.order(seed, workers, PARTITIONS[kind]).advanced(counts, taken * batch_size)
        sequence = Epochs(self._stream.order(seed, 1, PARTITIONS[0]), 0, counts, epochs or None)
        return Turns(sequence, workers, batch_size).counts(taken)
