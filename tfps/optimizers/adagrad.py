"""Adagrad whose dense update of an element depends only on that element.

TensorFlow's ``AdagradOptimizer`` multiplies by an approximate reciprocal square root (``ResourceApplyAdagrad``). But it
uses an exact one for the last elements of a tensor, which do not fill a vector register. So the position of an element
decides its last bit. The newer kernel (``ResourceApplyAdagradV2``) divides by the root, which is exact everywhere. So
variables can be updated together (``tfps.runtime.graph.passes.variable_packing``) with the same result as alone.
"""

import tensorflow.compat.v1 as tf

from tfps.tf_types import Gradient, Operation, Variable


class ExactAdagradOptimizer(tf.train.AdagradOptimizer):  # type: ignore[misc]
    """``tf.compat.v1.train.AdagradOptimizer`` (Duchi et al. 2011); the same arguments and slots."""

    elementwise = True  # see tfps.optimizers.base
    proportional_to_rate = True

    def _resource_apply_dense(self, grad: Gradient, var: Variable) -> Operation:
        """Update a variable by a gradient of the same shape."""
        kind = grad.dtype.base_dtype
        return tf.raw_ops.ResourceApplyAdagradV2(
            var=var.handle,
            accum=self.get_slot(var, "accumulator").handle,
            lr=tf.cast(self._learning_rate_tensor, kind),
            epsilon=tf.zeros([], kind),
            grad=grad,
            use_locking=self._use_locking,
        )
