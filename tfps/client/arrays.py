"""What callers give to a client, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.text import one_line, show


@dataclass(frozen=True)
class Rows:
    """Some rows of a gradient; all others are 0.

    Attributes:
        ids: int64 [n]: the numbers of the rows. One that occurs more than once counts as often.
        values: [n, ...]: the rows.
    """

    ids: Array
    values: Array


def as_array(name: str, value: Any, dtype: "np.dtype[Any] | None" = None) -> Array:
    """Return a value as an array in the machine's byte order.

    Args:
        name: The parameter that it is for.
        value: An array of any library; or a number of Python, or lists of numbers.
        dtype: What numbers of Python are converted to. Arrays keep theirs.

    Raises:
        ServiceError: If it is no array of numbers, or has masked elements.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ServiceError(f"{show(str(name))}: a masked array cannot be sent: give its filled() values.")
    is_array = hasattr(value, "__array__") and not isinstance(value, float)  # as np.float64 is one of Python's
    try:
        array: Array = np.asarray(value)
        if not is_array and dtype is not None and array.dtype.kind in "iuf":
            given = array
            with np.errstate(all="ignore"):  # what becomes Inf is refused by name
                array = given.astype(dtype)
            if dtype.kind in "iub" and not np.array_equal(array, given):
                raise ValueError(f"a number is none of {dtype.name}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ServiceError(f"{show(str(name))}: this is no array: {one_line(str(error))}") from None
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_ids(name: str, value: Any) -> Array:
    """Return ids of rows as int64 [n].

    Raises:
        ServiceError: If they are no whole numbers.
    """
    array = as_array(name, value)
    if array.size and array.dtype.kind not in "iu":
        raise ServiceError(f"{show(name)}: expected ids as int64 [n], given {TensorSpec.of(array)}.")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise ServiceError(f"{show(name)}: id {array.max()} is no row.")
    return array.astype(np.int64)


def check_mapping(what: str, given: Any) -> None:
    """Check that arrays are given by name.

    Raises:
        ServiceError: If they are not.
    """
    if not isinstance(given, Mapping):
        raise ServiceError(f"{what}: expected arrays by name, as a dict, given {type(given).__name__}.")
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise ServiceError(f"{what}: expected names, given {show(repr(wrong[0]))}.")
    if wrong := [name for name in given if not is_text(name)]:
        raise ServiceError(f"{what}: {show(wrong[0])} is no name: it is no Unicode text.")


def is_text(name: str) -> bool:
    """Return whether a name has a UTF-8 form: one with half of a surrogate pair has none."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fits(name: str, theirs: TensorSpec, own: TensorSpec) -> None:
    """Check that the value of a parameter fits what a model has.

    Raises:
        ServiceError: If it does not.
    """
    if theirs != own:
        raise ServiceError(f"{show(name)}: the service has {theirs}, the model {own}.")
