"""The gradients that a request has."""

from collections.abc import Mapping

from tfps.client.message import Message
from tfps.client.servers import DENSE, IDS, ROWS
from tfps.errors import ServiceError
from tfps.runtime.service.store import Gradient, Rows
from tfps.text import show

Part = Mapping[str, Gradient]


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
