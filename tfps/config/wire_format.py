"""How tensors travel between tasks, as ``--wire`` selects it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WireFormat:
    """How tensors travel between tasks.

    Attributes:
        pack: Whether small tensors travel together, and small variables live together.
        halves: Whether float32 tensors travel as bfloat16: half the bytes, less precision.
    """

    pack: bool
    halves: bool

    @classmethod
    def of(cls, wire: str) -> "WireFormat":
        """Return the format for a value of ``--wire``."""
        return _FORMATS[wire]


_FORMATS: Mapping[str, WireFormat] = {
    "plain": WireFormat(pack=False, halves=False),
    "packed": WireFormat(pack=True, halves=False),
    "bfloat16": WireFormat(pack=True, halves=True),
}
