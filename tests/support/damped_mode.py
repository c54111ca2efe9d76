"""A mode as another package adds it: asynchronous updates, each with a gradient divided by the number of workers.

It shows how little a mode needs, and takes no care of what ``async`` does: updates of two workers may meet in a
variable, and a checkpoint may be saved in the middle of one. It imports TensorFlow as it builds a step, because
commands that need no TensorFlow load every mode.
"""

from tfps.modes.base import Copy, Mode, ModeContext, Step
from tfps.tf_types import Operation, Optimizer, Tensor, Variable


class DampedMode(Mode):
    """``--mode=damped``."""

    name = "damped"
    is_blocking = False

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build a step that applies its gradient, and draws tickets from a counter beside ``global_step``."""
        import tensorflow.compat.v1 as tf  # noqa: PLC0415

        share = 1.0 / context.cluster.num_workers
        pairs = [(gradient * share, variable) for gradient, variable in optimizer.compute_gradients(loss)]
        applied = optimizer.apply_gradients(pairs, global_step)
        with tf.device(global_step.device):
            with tf.control_dependencies([applied]):
                train_op = global_step.assign_add(1, read_value=False)
            counter = tf.Variable(0, dtype=tf.int64, collections=[], trainable=False, use_resource=True, name="tickets")

        def draw(count: int, held: int = 0) -> Tensor:
            del held
            with tf.device(global_step.device):
                return counter.assign_add(count) - count + tf.range(count, dtype=tf.int64)

        def draw_after(count: int, copy: Copy) -> Tensor:
            with tf.control_dependencies([copy(train_op)]):
                return draw(count)

        def give_back(count: int) -> Operation:
            return counter.assign_sub(count, read_value=False)

        return Step(
            train_op=train_op,
            draw=draw,
            draw_after=draw_after,
            give_back=give_back,
            chief_init=counter.assign(global_step, read_value=False),
            worker_init=tf.no_op(),
        )
