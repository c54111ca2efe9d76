"""The optimizer of ``support.sign_optimizer``."""

from typing import Any

import tensorflow.compat.v1 as tf

from tfps.tf_types import Gradient, Operation, Variable


class SignSgdOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """Moves each element by the learning rate against its gradient's sign, with a slot of the last signs.

    Bernstein et al. 2018, "signSGD", algorithm 1, here with momentum 0.5 on the sign.
    """

    elementwise = True

    def __init__(self, learning_rate: float) -> None:
        super().__init__(use_locking=False, name="SignSgd")
        self._rate = learning_rate

    def _create_slots(self, var_list: Any) -> None:
        for variable in var_list:
            self._zeros_slot(variable, "sign", self._name)

    def _resource_apply_dense(self, grad: Gradient, var: Variable) -> Operation:
        slot = self.get_slot(var, "sign")
        change = 0.5 * slot.read_value() + tf.sign(grad)
        kept = slot.assign(change, read_value=False)
        with tf.control_dependencies([kept]):
            return var.assign_sub(self._rate * change, read_value=False)
