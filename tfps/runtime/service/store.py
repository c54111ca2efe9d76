"""The parameters of one server of a service, and their optimizer: TensorFlow's variables, used eagerly.

A read is of one moment, and takes no copy: TensorFlow writes a dense update into new memory while somebody still reads
the old one (``PrepareToUpdateVariable`` in tensorflow/core/kernels/training_op_helpers.h). The optimizers are those of
tfps, so the names of the slots are those of a TensorFlow job, like ``w/Adam``.
"""

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.client.message import Array, TensorSpec
from tfps.client.rows import Rows
from tfps.errors import ServiceError
from tfps.modes.sync import aggregation
from tfps.optimizers.registry import make_optimizer
from tfps.runtime.service.compiled_updates import CompiledUpdates
from tfps.text import did_you_mean, show
from tfps.tf_types import Variable

_DEFAULTS: Mapping[str, Any] = {"default": "sgd", "learning_rate": 0.01}

Gradient = Array | Rows


class Store:
    """The parameters.

    Args:
        optimizer: A name of ``tfps.optimizers``.
        learning_rate: Its learning rate.
        aggregate: How the gradients of an update are combined: ``mean``, ``sum``, or another one of ``--aggregate``.

    Attributes:
        selects: Whether an update applies one push only, as Krum's does: ``update`` takes no more then.
    """

    def __init__(self, optimizer: str = "sgd", learning_rate: float = 0.01, aggregate: str = "mean") -> None:
        self._options: Mapping[str, Any] = {"optimizer": optimizer, "learning_rate": learning_rate}
        self._optimizer = make_optimizer(self._options, **_DEFAULTS)
        self._aggregate, self._lock = aggregate, threading.Lock()
        self.selects = aggregate == "krum"
        self._variables: dict[str, Variable] = {}
        self._updates = CompiledUpdates(self._optimizer)
        self._specs: Mapping[str, TensorSpec] = {}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The dtype and the shape of each parameter."""
        return self._specs

    def reserved(self) -> tuple[Collection[str], Collection[str]]:
        """Return what the optimizer adds to a parameter's name for its slots, and the names of its other variables."""
        probe = Store(self._options["optimizer"], self._options["learning_rate"])
        probe.create({"": np.zeros(1, np.float32)})
        names = [name for name in probe.state() if name]
        slots = {name for name in names if name.startswith("/")}
        return slots, {name for name in names if name not in slots}

    def create(self, values: Mapping[str, Array]) -> None:
        """Create the parameters with their first values, of which they keep a copy, instead of those that there are.

        Raises:
            ServiceError: If one has the name of a slot of another one.
        """
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            self._optimizer = make_optimizer(self._options, **_DEFAULTS)
            self._variables = {
                name: tf.Variable(value, use_resource=True, name="parameter", dtype=value.dtype)
                for name, value in values.items()
            }
            self._specs = {name: TensorSpec.of(np.asarray(value)) for name, value in values.items()}
            if self._variables:
                self._optimizer._create_slots(list(self._variables.values()))
            self._updates = CompiledUpdates(self._optimizer)
            self._named()

    def check(self, gradients: Mapping[str, Gradient]) -> None:
        """Check that gradients fit the parameters, and are finite.

        Raises:
            ServiceError: If one does not: names it, with what is expected and what is given.
        """
        for name, gradient in gradients.items():
            self._check(name, gradient)

    def check_announced(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check what is announced of dense gradients, before it arrives.

        Raises:
            ServiceError: If a name is not known, or has another dtype or shape.
        """
        for name, given in tensors.items():
            expected = self._spec(name)
            if given != expected:
                raise ServiceError(f"{show(name)}: expected {expected}, given {given}.")

    def _spec(self, name: str) -> TensorSpec:
        self._variable(name)
        return self._specs[name]

    def _variable(self, name: str) -> Variable:
        if name not in self._variables:
            raise ServiceError(f"{show(name)} is no parameter.{did_you_mean(name, self._variables)}")
        return self._variables[name]

    def _check(self, name: str, gradient: Gradient) -> None:
        expected = self._spec(name)
        if isinstance(gradient, Rows):
            self.check_ids(name, gradient.ids)
            expected, values = TensorSpec(expected.dtype, (len(gradient.ids), *expected.shape[1:])), gradient.values
        else:
            values = gradient
        if TensorSpec.of(values) != expected:
            raise ServiceError(f"{show(name)}: expected {expected}, given {TensorSpec.of(values)}.")
        if not _is_finite(values):
            kind = "NaN" if np.isnan(values).any() else "Inf"
            raise ServiceError(f"{show(name)}: the gradient has {kind}; it is not applied.")

    def check_ids(self, name: str, ids: Array) -> None:
        """Check that ids are rows of a parameter.

        Raises:
            ServiceError: If one is not, or they are no vector of whole numbers.
        """
        shape = self._spec(name).shape
        if not shape:
            raise ServiceError(f"{show(name)} is a scalar, and has no rows.")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ServiceError(f"{show(name)}: expected ids as int64 [n], given {TensorSpec.of(ids)}.")
        wrong = ids[(ids < 0) | (ids >= shape[0])]
        if len(wrong):
            raise ServiceError(f"{show(name)}: id {wrong[0]} is no row: there are rows 0 to {shape[0] - 1}.")

    def read(self, names: Sequence[str] | None = None) -> Mapping[str, Array]:
        """Return parameters, all of one moment; all of them if no names are given. Do not write into the arrays.

        Raises:
            ServiceError: If a name is not known.
        """
        with self._lock:
            chosen = self._variables if names is None else {name: self._variable(name) for name in names}
            values = {name: _read(variable) for name, variable in chosen.items()}
        return {name: np.asarray(memoryview(value)) for name, value in values.items()}

    def read_rows(self, name: str, ids: Array) -> Array:
        """Return rows of a parameter: [n, ...] for ids [n], which may repeat.

        Raises:
            ServiceError: If an id is no row.
        """
        self.check_ids(name, ids)
        with self._lock:
            rows = self._variable(name).sparse_read(tf.constant(ids))
        return np.asarray(memoryview(rows))

    def update(self, pushes: Sequence[Mapping[str, Gradient]], count: int = 0) -> None:
        """Apply the combined gradients of an update. They have been checked.

        A push that lacks a parameter counts as a gradient of 0 for it, unless no push has it.

        Args:
            pushes: Of each push, the gradients by name; in the order in which they are added up.
            count: How many pushes the update is of, if some have no part here.
        """
        pushes = [*pushes, *[{}] * (count - len(pushes))]
        names = [name for name in self._variables if any(name in push for push in pushes)]
        with tf.device("CPU:0"):
            combined = [(self._combined(name, pushes), self._variables[name]) for name in names]
            with self._lock:
                if combined:
                    self._updates.apply(combined)
                else:
                    self._finish()

    def _finish(self) -> None:
        """Do what the optimizer does in an update beside the variables, as Adam does with its powers."""
        if self._optimizer._non_slot_variables():
            self._optimizer._prepare()
            self._optimizer._finish([], "update")

    def _combined(self, name: str, pushes: Sequence[Mapping[str, Gradient]]) -> Any:
        given = [push[name] for push in pushes if name in push]
        if len(pushes) == 1 and self._aggregate in ("mean", "sum", "krum"):
            return _tensor(given[0], self._variables[name])
        if self._aggregate in ("mean", "sum"):
            return self._summed(name, given, len(pushes))
        shape = self._variables[name].shape.as_list()
        dense = [_dense(one, shape) for one in given]
        dense += [np.zeros_like(dense[0])] * (len(pushes) - len(given))
        return aggregation.ELEMENTWISE[self._aggregate](tf.constant(np.stack(dense)))

    def _summed(self, name: str, given: Sequence[Gradient], count: int) -> Any:
        divisor = count if self._aggregate == "mean" else 1
        if all(isinstance(one, Rows) for one in given):
            rows = [one for one in given if isinstance(one, Rows)]
            values = np.concatenate([one.values for one in rows])
            values = values / values.dtype.type(divisor) if divisor > 1 else values
            return _tensor(Rows(np.concatenate([one.ids for one in rows]), values), self._variables[name])
        shape = self._variables[name].shape.as_list()
        first, *others = (_dense(one, shape) for one in given)
        total = first.copy()
        with np.errstate(over="ignore"):
            for one in others:
                total += one
        mean = total / total.dtype.type(divisor) if divisor > 1 else total
        if not _is_finite(mean):  # the sum is too large for its dtype, and the mean may not be
            mean = np.sum([_dense(one, shape).astype(np.float64) / divisor for one in given], axis=0).astype(
                total.dtype
            )
        return _shared(mean)

    def state(self) -> Mapping[str, Array]:
        """Return all parameters and slots of one moment, by the names of a checkpoint."""
        with self._lock:
            values = {name: _read(variable) for name, variable in self._named().items()}
        return {name: np.asarray(memoryview(value)) for name, value in values.items()}

    def restore(self, names: Sequence[str], state: Mapping[str, Array]) -> None:
        """Create the parameters, and give them and their slots the values of a checkpoint.

        Args:
            names: The parameters.
            state: By name, the values. Those of slots may be missing: they get their first ones. Others are left out.
        """
        self.create({name: state[name] for name in names})
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            for name, variable in self._named().items():
                if name in state:
                    variable.assign(state[name])

    def _named(self) -> Mapping[str, Variable]:
        """Return all variables by the names that they have in a TensorFlow job: ``w``, ``w/Adam``, ``w/Adam_1``."""
        named = dict(self._variables)
        for name, variable in self._variables.items():
            own = [self._optimizer.get_slot(variable, kind) for kind in self._optimizer.get_slot_names()]
            made = sorted((slot for slot in own if slot is not None), key=lambda slot: _parts(slot.name)[1])
            for index, slot in enumerate(made):  # in the order in which they were created
                own_name = f"{name}/{_parts(slot.name)[0]}" + (f"_{index}" if index else "")
                if own_name in self._variables:
                    raise ServiceError(f"{show(own_name)} is the name of a parameter, and of the optimizer's state.")
                named[own_name] = slot
        # Not ``variables()``: it leaves out those that another thread has created.
        return named | {_parts(variable.name)[0]: variable for variable in self._optimizer._non_slot_variables()}


def _parts(name: str) -> tuple[str, int]:
    """Return the last part of a name, and the number by which TensorFlow has made it unique, 0 for none."""
    found = re.fullmatch(r"(.*?)(?:_(\d+))?", name.partition(":")[0].rpartition("/")[2])
    assert found
    return found[1], int(found[2] or 0)


def _tensor(gradient: Gradient, variable: Variable) -> Any:
    if isinstance(gradient, Rows):
        shape = tf.constant(variable.shape.as_list(), tf.int64)
        return tf.IndexedSlices(_shared(gradient.values), _shared(gradient.ids), shape)
    return _shared(gradient)


def _read(variable: Variable) -> Any:
    """Return a variable's value, without a copy; ``read_value`` takes one operation more."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _shared(array: Array) -> Any:
    """Return an array as a tensor: with the same memory if TensorFlow can use that; ``tf.constant`` never does."""
    return tf.raw_ops.Identity(input=array)


def _is_finite(array: Array) -> bool:
    """Return whether no number is NaN or Inf: such a sum has none, and only one that overflows needs a second look."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def _dense(gradient: Gradient, shape: Sequence[int]) -> Array:
    if not isinstance(gradient, Rows):
        return gradient
    found = np.zeros(shape, gradient.values.dtype)
    np.add.at(found, gradient.ids, gradient.values)
    return found
