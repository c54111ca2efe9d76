"""Converters for the values of flags: each parses a text, or raises ``ValueError`` with what would be valid."""

import math
import re
from collections.abc import Callable
from typing import Any

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1

Converter = Callable[[str], Any]


def text(value: str) -> str:
    """Accept any text that is not blank."""
    if not value.strip():
        raise ValueError("is empty: give a value or leave the flag out")
    return value


def directory(value: str) -> str:
    """Accept a path but no URL, which would create a directory ``gs:`` in the working directory."""
    if "://" in value:
        raise ValueError("is a URL: give the directory where the bucket is mounted")
    return text(value)


def integer(low: int, high: int) -> Converter:
    """Return a converter for decimal integers from ``low`` to ``high``."""

    def convert(value: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,30}", value) and low <= int(value) <= high:
            return int(value)
        upper = {INT64_MAX: "2^63 - 1", INT32_MAX: "2^31 - 1"}.get(high, str(high))
        raise ValueError(f"must be a whole number from {max(low, 0)} to {upper}")

    return convert


def number(above: float, most: float = math.inf) -> Converter:
    """Return a converter for finite numbers greater than ``above`` and not greater than ``most``."""
    bounds = f"a finite number greater than {above:g}" if most == math.inf else f"above {above:g} and at most {most:g}"

    def convert(value: str) -> float:
        plain = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value)
        parsed = float(value) if plain else math.nan
        if not math.isfinite(parsed) or parsed <= above or parsed > most:
            raise ValueError(f"must be {bounds}")
        return parsed

    return convert


def number_from(lowest: float) -> Converter:
    """Return a converter for finite numbers that are not less than ``lowest``."""
    greater = number(-math.inf)

    def convert(value: str) -> float:
        try:
            parsed = greater(value)
        except ValueError:
            parsed = -math.inf
        if parsed < lowest:
            raise ValueError(f"must be a finite number, {lowest:g} or greater")
        return float(parsed)

    return convert


def memory(value: str) -> int:
    """Parse an amount of memory into bytes: ``8Gi`` is 8 * 2^30, ``500M`` is 500 * 10^6."""
    match = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)([KMGT]i?|)B?", value)
    units = {unit + i: (1024 if i else 1000) ** n for n, unit in enumerate("KMGT", 1) for i in ("", "i")}
    size = int(float(match[1]) * units.get(match[2], 1)) if match else 0
    if not 2**20 <= size <= 2**50:
        raise ValueError("must be a number and a unit, like 8Gi or 500M, from 1Mi to 1024Ti")
    return size


def plain_name(value: str) -> str:
    """Accept a name that every platform accepts."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", value):
        raise ValueError("must be at most 40 characters of a-z, 0-9 and -, start with a letter and not end with -")
    return value


def dns_label(value: str) -> str:
    """Accept a DNS label (RFC 1123)."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
        raise ValueError("must be a DNS label: at most 63 characters of a-z, 0-9 and -, no - at either end")
    return value


def boolean(value: str) -> bool:
    """Parse 1/0, true/false, yes/no, in any case."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value.lower() not in known:
        raise ValueError("must be 1 or 0")
    return known[value.lower()]
