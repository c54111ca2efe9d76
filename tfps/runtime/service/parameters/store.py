"""The parameters of one server of a service, and their optimizer: TensorFlow's variables, used eagerly.

A read is of one moment, and takes no copy: TensorFlow writes a dense update into new memory while somebody still reads
the old one (``PrepareToUpdateVariable`` in tensorflow/core/kernels/training_op_helpers.h). The optimizers are those of
tfps, so the names of the slots are those of a TensorFlow job, like ``w/Adam``.
"""

import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.client.arrays import Rows
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.optimizers.registry import make_optimizer
from tfps.runtime.service.parameters.aggregate import BufferValue, Change, combined, combined_buffer, is_finite
from tfps.runtime.service.parameters.compiled_updates import CompiledUpdates, read_value
from tfps.text import did_you_mean, show
from tfps.tf_types import Variable

log = logging.getLogger(__name__)
_DEFAULTS: Mapping[str, Any] = {"default": "sgd", "learning_rate": 0.01}


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
        self._reads: dict[str, Array] = {}  # values that no update has changed since

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

    def create(self, values: Mapping[str, Array], buffers: Collection[str] = ()) -> None:
        """Create the parameters with their first values, of which they keep a copy, instead of those that there are.

        Args:
            values: The values by name.
            buffers: Those that no optimizer changes.

        Raises:
            ServiceError: If one has the name of a slot of another one.
        """
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            self._reads.clear()
            self._optimizer = make_optimizer(self._options, **_DEFAULTS)
            self._variables = {
                name: tf.Variable(value, use_resource=True, name="parameter", dtype=value.dtype)
                for name, value in values.items()
            }
            self._specs = {name: TensorSpec.of(np.asarray(value), name in buffers) for name, value in values.items()}
            if trained := [one for name, one in self._variables.items() if name not in buffers]:
                self._optimizer._create_slots(trained)
            self._updates = CompiledUpdates(self._optimizer)
            self._named()

    def check(self, changes: Mapping[str, Change]) -> None:
        """Check that gradients, and values of buffers, fit the parameters, and are finite.

        Raises:
            ServiceError: If one does not: names it, with what is expected and what is given.
        """
        for name, change in changes.items():
            self._check(name, change)

    def check_announced(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check what is announced of dense gradients and buffers, before it arrives.

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

    def _check(self, name: str, change: Change) -> None:
        expected, what = self._spec(name), "gradient"
        if isinstance(change, Rows):
            self.check_ids(name, change.ids)
            expected, values = replace(expected, shape=(len(change.ids), *expected.shape[1:])), change.values
        elif isinstance(change, BufferValue):
            values, what = change.value, "value"
        else:
            values = change
        is_buffer = isinstance(change, BufferValue)
        if not expected.fits(values, is_buffer):
            raise ServiceError(f"{show(name)}: expected {expected}, given {TensorSpec.of(values, is_buffer)}.")
        if not is_finite(values):
            kind = "NaN" if np.isnan(values).any() else "Inf"
            raise ServiceError(f"{show(name)}: the {what} has {kind}; it is not applied.")

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
            return {name: self._value(name) for name in (self._variables if names is None else names)}

    def _value(self, name: str) -> Array:
        """Return a parameter, read once between two updates of it; a copy lasts only as long as its reader needs it."""
        if name in self._reads:
            return self._reads[name]
        variable = self._variable(name)
        value = _array(read_value(variable))
        if not self._updates.is_copied(variable):
            self._reads[name] = value
        return value

    def read_rows(self, name: str, ids: Array) -> Array:
        """Return rows of a parameter: [n, ...] for ids [n], which may repeat.

        Raises:
            ServiceError: If an id is no row.
        """
        self.check_ids(name, ids)
        with self._lock:
            rows = self._variable(name).sparse_read(tf.constant(ids))
        return _array(rows)

    def update(self, pushes: Sequence[Mapping[str, Change]], count: int = 0) -> None:
        """Apply the combined gradients of an update, and assign its buffers. They have been checked.

        A push that lacks a parameter counts as a gradient of 0 for it, unless no push has it.

        Args:
            pushes: Of each push, the changes by name; in the order in which they are added up.
            count: How many pushes the update is of, if some have no part here.
        """
        pairs, names, buffers = [], [], {}
        with tf.device("CPU:0"):
            for name, variable in self._variables.items():
                given: Any = [push[name] for push in pushes if name in push]
                if given and self._specs[name].is_buffer:
                    buffers[name] = combined_buffer(given, self._aggregate)
                elif given:
                    shape = self._specs[name].shape
                    pairs.append((combined(given, max(count, len(pushes)), self._aggregate, shape), variable))
                    names.append(name)
            with self._lock:
                for name in (*names, *buffers):
                    self._reads.pop(name, None)  # before the update, which would copy what is in use
                if pairs:
                    values = self._updates.apply(pairs)
                    self._reads |= {names[index]: _array(value) for index, value in values.items()}
                else:
                    self._finish()
                for name, value in buffers.items():
                    self._variables[name].assign(value)

    def _finish(self) -> None:
        """Do what the optimizer does in an update beside the variables, as Adam does with its powers."""
        if self._optimizer._non_slot_variables():
            self._optimizer._prepare()
            self._optimizer._finish([], "update")

    def state(self) -> Mapping[str, Array]:
        """Return all parameters and slots of one moment, by the names of a checkpoint."""
        with self._lock:
            return {name: _array(read_value(variable)) for name, variable in self._named().items()}

    def restore(self, specs: Mapping[str, TensorSpec], state: Mapping[str, Array]) -> None:
        """Create the parameters, and give them and their slots the values of a checkpoint.

        Args:
            specs: The parameters.
            state: By name, the values. Those of slots may be missing: they get their first ones. Others are left out.
        """
        buffers = [name for name, spec in specs.items() if spec.is_buffer]
        self.create({name: state[name] for name in specs}, buffers)
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            own = self._named()
            self._reads.clear()
            for name, variable in own.items():
                if name in state:
                    variable.assign(state[name])
        if missing := sorted(own.keys() - state.keys()):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            log.warning("%s%s: not in the checkpoint. The optimizer's state begins again.", show(missing[0]), more)

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


def _array(value: Any) -> Array:
    """Return a tensor as an array, without a copy."""
    return np.asarray(memoryview(value))
