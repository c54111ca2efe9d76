"""``--devices_per_worker``: on which devices of its machine a worker computes. Must not import TensorFlow."""

import re
from dataclasses import dataclass

_MOST = 64


@dataclass(frozen=True)
class DeviceRequest:
    """The devices that a worker is to use.

    Attributes:
        kind: ``GPU``, or ``CPU`` for logical devices that share the machine's cores.
        count: Their number; ``None`` for all that the worker has.
    """

    kind: str
    count: int | None = None


def devices(value: str) -> str:
    """Accept a number of GPUs, or ``cpu:N`` for N logical CPU devices."""
    match = re.fullmatch(r"(?:cpu:)?([0-9]{1,9})", value)
    if match is None or not 1 <= int(match[1]) <= _MOST:
        raise ValueError(f"must be a number of GPUs from 1 to {_MOST}, or cpu:N for N logical CPU devices")
    return value


def requested(value: str | None) -> DeviceRequest:
    """Return what a value of ``--devices_per_worker`` asks for; without one, all GPUs."""
    if value is None:
        return DeviceRequest("GPU")
    kind, _, count = value.rpartition(":")
    return DeviceRequest(kind.upper() or "GPU", int(count))
