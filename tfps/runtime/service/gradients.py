"""What a push has: gradients, and values of buffers."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tfps.client.arrays import Rows
from tfps.client.message import Array, Message, TensorSpec
from tfps.client.servers import BUFFER, DENSE, IDS, ROWS
from tfps.errors import ProtocolError, ServiceError
from tfps.runtime.service.parameters.aggregate import BufferValue, Change, Gradient
from tfps.runtime.service.pushes import PushId
from tfps.runtime.service.session import Session
from tfps.text import show

Part = Mapping[str, Change]
_MOST_ID_BYTES, _MOST_ROW_BYTES = 64 << 20, 1 << 30
_Given = TypeVar("_Given")


def part_of(request: Message) -> Part:
    """Return the gradients, and the values of buffers, that a push has.

    Raises:
        ServiceError: If it has rows without ids, or the other way round.
    """
    part: dict[str, Change] = {}
    tensors = request.tensors
    for name, array in tensors.items():
        kind, own = name[: len(DENSE)], name[len(DENSE) :]
        if kind == DENSE:
            part[own] = array
        elif kind == BUFFER:
            part[own] = BufferValue(array)
        elif kind == ROWS and IDS + own in tensors:
            part[own] = Rows(tensors[IDS + own], array)
        elif not (kind == IDS and ROWS + own in tensors):
            raise ServiceError(f"{show(name)} is no gradient or buffer: d/NAME, i/NAME with r/NAME, or b/NAME.")
    return part


def arrays_in(tensors: Mapping[str, _Given]) -> dict[str, _Given]:
    """Return dense arrays, and those of buffers, by the names of their parameters."""
    return {name[len(DENSE) :]: given for name, given in tensors.items() if name.startswith((DENSE, BUFFER))}


def buffers_in(tensors: Collection[str]) -> list[str]:
    """Return the names of the buffers among the arrays of a message."""
    return [name[len(BUFFER) :] for name in tensors if name.startswith(BUFFER)]


def announced(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return what is announced of dense arrays and buffers, by the names of their parameters."""
    return arrays_in(
        {name: replace(spec, is_buffer=True) if name.startswith(BUFFER) else spec for name, spec in tensors.items()}
    )


def named(values: Mapping[str, Array], specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """Return values by the names that they have in a message."""
    return {(BUFFER if name in specs and specs[name].is_buffer else DENSE) + name: one for name, one in values.items()}


def check_rows(tensors: Mapping[str, TensorSpec], specs: Mapping[str, TensorSpec]) -> None:
    """Check what is announced of rows: that it is no more than can be meant.

    Raises:
        ServiceError: If it is of no parameter, or too much.
    """
    for name, spec in tensors.items():
        if not name.startswith((IDS, ROWS)):
            continue
        own = specs.get(name[len(ROWS) :])
        if own is None:
            raise ServiceError(f"{show(name[len(ROWS) :])} is no parameter.")
        if own.is_buffer:
            raise ServiceError(f"{show(name[len(ROWS) :])}: expected {own}, given rows of a gradient.")
        if name.startswith(IDS) and spec.dtype != np.int64:
            raise ServiceError(f"{show(name[len(ROWS) :])}: expected ids as int64 [n], given {spec}.")
        if spec.num_bytes > 16 * max(own.num_bytes, 1 << 20):
            raise ServiceError(f"{show(name[len(ROWS) :])}: {spec.num_bytes:,} bytes of rows are too many at a time.")


def push_id(request: Message, session: Session) -> PushId:
    """Return the identity of a push.

    Raises:
        ProtocolError: If its number is none.
    """
    number = int(request.metadata["push"])
    if number < 1:
        raise ProtocolError(f"push {number}: pushes are numbered from 1 on.")
    return PushId(session.client, number)


def check_wanted_rows(name: str, own: TensorSpec | None, num_ids: int) -> None:
    """Check how many rows a request wants.

    Raises:
        ServiceError: If they are too many, or of no parameter.
    """
    if own is None:
        raise ServiceError(f"{show(name)} is no parameter.")
    num_bytes = num_ids * math.prod(own.shape[1:]) * own.dtype.itemsize
    if own.shape and num_bytes > _MOST_ROW_BYTES:
        raise ServiceError(f"{show(name)}: {num_bytes:,} bytes of rows are too many at a time.")


def gradients_of(part: Part) -> Mapping[str, Gradient]:
    """Return a part without the values of buffers."""
    return {name: change for name, change in part.items() if not isinstance(change, BufferValue)}


def push_ids(text: str) -> list[PushId]:
    """Return the identities of pushes, of which the first server has told as JSON."""
    return [PushId(client, number) for client, number in json.loads(text)]


def check_ids(tensors: Mapping[str, TensorSpec]) -> None:
    """Check what a request for rows announces.

    Raises:
        ProtocolError: If it is not one array of ids, or too much.
    """
    ids = tensors.get("ids")
    if len(tensors) != 1 or ids is None or ids.num_bytes > _MOST_ID_BYTES or ids.dtype != np.int64:
        raise ProtocolError("pull_rows takes ids: int64 [n], 64 MB at most.")
