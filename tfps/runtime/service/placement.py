"""Which server of a service holds which parameter, and who gives their first values. The first server decides.

The first client that asks gives the values. Until it has, the others wait. If its connection is lost meanwhile, the
next one gives them.
"""

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tfps.client.arrays import is_text
from tfps.client.message import TensorSpec
from tfps.errors import NotReadyError, ServiceError
from tfps.text import show

_LOOK_SECS = 0.5
_NOT_YET = "the service has no parameters yet: call init with their first values."


class Placement:
    """The parameters of a service, and their servers.

    Args:
        num_ps: The number of servers.
        giver_secs: How long a client has to give the first values while another one waits.
    """

    def __init__(self, num_ps: int, giver_secs: float = math.inf) -> None:
        self._num_ps, self._giver_secs = num_ps, giver_secs
        self._specs: dict[str, TensorSpec] = {}
        self._places: dict[str, int] = {}
        self._giver: object = None
        self._id = ""
        self._is_ready = False
        self._changed = threading.Condition(threading.RLock())

    def begin(self, specs: Mapping[str, TensorSpec], giver: object, is_gone: Callable[[], bool] = lambda: False) -> str:
        """Return the id under which a client has to give the first values; empty if it has not. Wait for another one.

        Raises:
            ServiceError: If there are other parameters.
            ConnectionResetError: If the client is gone while it waits.
        """
        with self._changed:
            began = time.monotonic()
            while self._giver is not None and self._giver is not giver:
                if not self._changed.wait(_LOOK_SECS) and is_gone():
                    raise ConnectionResetError("the client is gone")
                if time.monotonic() - began > self._giver_secs:
                    self.leave(self._giver)
            if self._is_ready:
                self._check(specs)
                return ""
            if not specs:
                raise ServiceError("there is no parameter: give one or more.")
            self._giver, self._id = giver, uuid.uuid4().hex
            self._specs, self._places = dict(specs), _places(specs, self._num_ps)
            return self._id

    def check_giver(self, given: str) -> None:
        """Check that a client is the one that has to give the first values.

        Raises:
            NotReadyError: If it is not any more.
        """
        if not given or given != self._id:
            raise NotReadyError("another client gives the first values.")

    def end(self, given: str) -> None:
        """Note that a client has given the first values, which all servers keep now.

        Raises:
            NotReadyError: If it was not to give them any more.
        """
        with self._changed:
            self.check_giver(given)
            self._giver, self._id, self._is_ready = None, "", True
            self._changed.notify_all()

    def leave(self, giver: object) -> None:
        """Let another client give the values, if this one was to, and is gone."""
        with self._changed:
            if self._giver is giver:
                self._giver, self._id = None, ""
                self._changed.notify_all()

    def restart(self, specs: Mapping[str, TensorSpec] | None) -> None:
        """Begin again with the parameters of a checkpoint, or with none."""
        with self._changed:
            self._giver, self._id, self._is_ready = None, "", specs is not None
            self._specs, self._places = dict(specs or {}), _places(specs or {}, self._num_ps)
            self._changed.notify_all()

    def specs_of_server(self, index: int) -> Mapping[str, TensorSpec]:
        """Return the parameters of a server, and what each has to be."""
        return {name: self._specs[name] for name in self.of_server(index)}

    def of_server(self, index: int) -> list[str]:
        """Return the parameters of a server."""
        return [name for name, place in self._places.items() if place == index]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The parameters by name."""
        return self._specs

    @property
    def is_ready(self) -> bool:
        """Whether there are parameters."""
        return self._is_ready

    def check_ready(self) -> None:
        """Check that there are parameters.

        Raises:
            ServiceError: If there are none yet.
        """
        if not self._is_ready:
            raise ServiceError(_NOT_YET)

    def described(self) -> str:
        """Return the parameters as JSON: by name, dtype, shape, server, and whether it is a buffer."""
        return json.dumps(
            {
                name: [spec.dtype.name, list(spec.shape), self._places[name], spec.is_buffer]
                for name, spec in self._specs.items()
            }
        )

    def _check(self, specs: Mapping[str, TensorSpec]) -> None:
        for name, spec in specs.items():
            if name not in self._specs:
                raise ServiceError(f"{show(name)}: the service has other parameters, and none of this name.")
            if spec != self._specs[name]:
                raise ServiceError(f"{show(name)}: expected {self._specs[name]}, given {spec}.")
        if missing := [name for name in self._specs if name not in specs]:
            raise ServiceError(f"{show(missing[0])} is missing: the service has {len(self._specs)} parameters.")


class FirstValues:
    """What a server has to get before its parameters have values, from which client, and whether it has got it."""

    def __init__(self) -> None:
        self._giver, self._is_complete = "", False
        self._specs: Mapping[str, TensorSpec] = {}

    def expect(self, giver: str, specs: Mapping[str, TensorSpec]) -> None:
        """Wait for the values of a client."""
        self._giver, self._specs, self._is_complete = giver, dict(specs), False

    def check(self, giver: str, specs: Mapping[str, TensorSpec]) -> None:
        """Check what a client announces, before it arrives.

        Raises:
            NotReadyError: If another client gives the values.
            ServiceError: If it differs from what the client has announced.
        """
        if not giver or giver != self._giver:
            raise NotReadyError("another client gives the first values.")
        for name in {**self._specs, **specs}:
            if specs.get(name) != self._specs.get(name):
                given = specs.get(name, "nothing")
                raise ServiceError(f"{show(name)}: expected {self._specs.get(name, 'nothing')}, given {given}.")

    def got(self, giver: str) -> None:
        """Note that they are here."""
        self._is_complete = giver == self._giver

    def check_complete(self, giver: str) -> None:
        """Check that they are here.

        Raises:
            NotReadyError: If not, or if another client gives them now.
        """
        if not giver or giver != self._giver or not self._is_complete:
            raise NotReadyError("the first values are not here.")


def check_finite(values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Check first values: what is not finite could never be saved.

    Raises:
        ServiceError: If one is not finite.
    """
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise ServiceError(f"{show(name)}: the first value has {'NaN' if np.isnan(value).any() else 'Inf'}.")


def check_names(specs: Mapping[str, TensorSpec], slots: Collection[str], reserved: Collection[str]) -> None:
    """Check that parameters can be in a checkpoint beside the optimizer's own variables.

    Args:
        specs: The parameters.
        slots: What the optimizer adds to the name of a parameter.
        reserved: Names that no parameter may have.

    Raises:
        ServiceError: If one cannot: names it.
    """
    for name, spec in specs.items():
        if not is_text(name):
            raise ServiceError(f"{show(name)} is no name for a parameter: it is no Unicode text.")
        owners = [name[: -len(slot)] for slot in slots if name.endswith(slot)]
        if not name or name in reserved or any(owner in specs for owner in owners):
            raise ServiceError(f"{show(name)} is no name for a parameter: the checkpoint has it for something else.")
        if spec.dtype.kind != "f" and not spec.is_buffer:
            expected = "expected float16, float32 or float64"
            raise ServiceError(f"{show(name)}: {expected}, given {spec}. Give what is not trained as a buffer.")


def specs_as_text(specs: Mapping[str, TensorSpec]) -> str:
    """Return what ``specs_of`` reads."""
    return json.dumps({name: [spec.dtype.name, list(spec.shape), spec.is_buffer] for name, spec in specs.items()})


def specs_of(text: str) -> Mapping[str, TensorSpec]:
    """Return what a client announces as JSON: by name, dtype, shape, and whether it is a buffer, if it says so.

    Raises:
        ServiceError: If it cannot be read.
    """
    try:
        rows = json.loads(text)
        return {
            str(name): TensorSpec(np.dtype(dtype), tuple(map(int, shape)), *map(bool, kind))
            for name, (dtype, shape, *kind) in rows.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ServiceError(f"the parameters of begin_init cannot be read: {error}") from None


def _places(specs: Mapping[str, TensorSpec], num_ps: int) -> dict[str, int]:
    """Return a server for each parameter: the largest first, each to the server with the fewest bytes."""
    loads = [0] * num_ps
    found = {}
    for name in sorted(specs, key=lambda each: (-specs[each].num_bytes, each)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += specs[name].num_bytes
    return found
