"""Typed reading of JSON that another program, another version or a person has written. Does not import TensorFlow."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import overload


class JsonObject:
    """A JSON object whose content is not known. An entry that is missing, null, or of another type is ``None``.

    Attributes:
        content: The entries by name; empty if the value is no object.
    """

    def __init__(self, content: object) -> None:
        self.content: Mapping[str, object] = content if isinstance(content, Mapping) else {}

    def has_any(self, kind: type) -> bool:
        """Return whether any field of a dataclass is an entry."""
        return any(entry.name in self.content for entry in fields(kind))

    def text(self, name: str) -> str | None:
        """Return a text."""
        value = self.content.get(name)
        return value if isinstance(value, str) else None

    @overload
    def number(self, name: str) -> float | None: ...
    @overload
    def number(self, name: str, default: float) -> float: ...
    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number, which stays an ``int`` if it was written as one."""
        value = self.content.get(name)
        return value if isinstance(value, (int, float)) else default

    def integer(self, name: str) -> int | None:
        """Return a whole number, which people may have written as ``7.0``."""
        value = self.number(name)
        return int(value) if isinstance(value, int) or (value is not None and value.is_integer()) else None

    def boolean(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self.content.get(name)
        return value if isinstance(value, bool) else None

    def texts(self, name: str) -> Sequence[str]:
        """Return a list of texts; empty where there is none."""
        value = self.content.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def integers(self, name: str) -> Sequence[int] | None:
        """Return a list of whole numbers."""
        value = self.content.get(name)
        return [item for item in value if isinstance(item, int)] if isinstance(value, list) else None

    def numbers(self, name: str) -> Mapping[str, float]:
        """Return an object of numbers; empty where there is none."""
        inner = JsonObject(self.content.get(name))
        return {key: value for key in inner.content if (value := inner.number(key)) is not None}

    def objects(self, name: str) -> Mapping[str, "JsonObject"]:
        """Return an object of objects; empty where there is none."""
        inner = JsonObject(self.content.get(name))
        return {key: JsonObject(value) for key, value in inner.content.items()}
