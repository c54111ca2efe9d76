"""The gradients that a request has."""

import json
from collections.abc import Mapping
from typing import TypeVar

from tfps.client.message import Message, TensorSpec
from tfps.client.rows import Rows
from tfps.client.servers import DENSE, IDS, ROWS
from tfps.errors import ProtocolError, ServiceError
from tfps.runtime.service.pushes import PushId
from tfps.runtime.service.session import Session
from tfps.runtime.service.store import Gradient
from tfps.text import show

Part = Mapping[str, Gradient]
_MOST_ID_BYTES = 64 << 20
_Given = TypeVar("_Given")


def part_of(request: Message) -> Part:
    """Return the gradients that a push has.

    Raises:
        ServiceError: If it has rows without ids, or the other way round.
    """
    part: dict[str, Gradient] = {}
    tensors = request.tensors
    for name, array in tensors.items():
        kind, own = name[: len(DENSE)], name[len(DENSE) :]
        if kind == DENSE:
            part[own] = array
        elif kind == ROWS and IDS + own in tensors:
            part[own] = Rows(tensors[IDS + own], array)
        elif not (kind == IDS and ROWS + own in tensors):
            raise ServiceError(f"{show(name)} is no gradient: d/NAME, or i/NAME with r/NAME.")
    return part


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


def push_ids(text: str) -> list[PushId]:
    """Return the identities of pushes, of which the first server has told as JSON."""
    return [PushId(client, number) for client, number in json.loads(text)]


def dense_in(tensors: Mapping[str, _Given]) -> dict[str, _Given]:
    """Return by parameter what is given of dense arrays."""
    return {name[len(DENSE) :]: given for name, given in tensors.items() if name.startswith(DENSE)}


def check_ids(tensors: Mapping[str, TensorSpec]) -> None:
    """Check what a request for rows announces.

    Raises:
        ProtocolError: If it is not one array of ids, or too much.
    """
    ids = tensors.get("ids")
    if len(tensors) != 1 or ids is None or ids.num_bytes > _MOST_ID_BYTES:
        raise ProtocolError("pull_rows takes ids: int64 [n], 64 MB at most.")
