"""Some rows of a gradient, as a client sends them and a server applies them."""

from dataclasses import dataclass

from tfps.client.message import Array


@dataclass(frozen=True)
class Rows:
    """Some rows of a gradient; all others are 0.

    Attributes:
        ids: int64 [n]: the numbers of the rows. One that occurs more than once counts as often.
        values: [n, ...]: the rows.
    """

    ids: Array
    values: Array
