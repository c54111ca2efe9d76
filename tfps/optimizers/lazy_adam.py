"""Adam whose sparse updates touch only the rows in the gradient.

TensorFlow's ``AdamOptimizer`` decays the moments of every row at each step. So it reads and writes a whole embedding
table for a few rows of it. Here a row's moments stay unchanged while no gradient has the row, as in the former
``tf.contrib.opt.LazyAdamOptimizer``. The bias correction still counts the job's steps (Kingma and Ba 2015, section 2).
TensorFlow's own kernel updates dense variables, and the slots have the same names.
"""

import tensorflow.compat.v1 as tf

from tfps.tf_types import Gradient, Operation, Tensor, Variable


class LazyAdamOptimizer(tf.train.AdamOptimizer):  # type: ignore[misc]
    """``tf.compat.v1.train.AdamOptimizer``, lazy on sparse gradients; the same arguments."""

    elementwise = True  # see tfps.optimizers.base
    proportional_to_rate = True

    def _resource_apply_sparse(self, grad: Gradient, handle: Variable, indices: Tensor) -> Operation:
        """Update some rows.

        Args:
            grad: float [n, ...]: the rows' gradients.
            handle: The resource variable.
            indices: int [n], each row once.
        """
        kind = handle.dtype.base_dtype
        rate, decay1, decay2, epsilon = (
            tf.cast(value, kind) for value in (self._lr_t, self._beta1_t, self._beta2_t, self._epsilon_t)
        )
        power1, power2 = (tf.cast(power, kind) for power in self._get_beta_accumulators())
        first = self._decayed(self.get_slot(handle, "m"), indices, decay1, grad)
        second = self._decayed(self.get_slot(handle, "v"), indices, decay2, tf.square(grad))
        change = rate * tf.sqrt(1 - power2) / (1 - power1) * first / (tf.sqrt(second) + epsilon)
        # self._resource_scatter_add would read the whole variable afterwards.
        return tf.raw_ops.ResourceScatterAdd(resource=handle.handle, indices=indices, updates=-change)

    def _decayed(self, slot: Variable, indices: Tensor, decay: Tensor, value: Tensor) -> Tensor:
        """Update rows of a moment toward ``value``; returns the new rows."""
        rows = decay * tf.gather(slot, indices) + (1 - decay) * value
        update = tf.raw_ops.ResourceScatterUpdate(resource=slot.handle, indices=indices, updates=rows)
        with tf.control_dependencies([update]):
            return tf.identity(rows)
