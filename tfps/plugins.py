"""Tables of names: the classes of tfps by name, and those that other packages add through entry points.

A class is imported when it is used: the command line checks names without importing what they stand for.
"""

import importlib
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, TypeVar, cast

from tfps.errors import ConfigError

_T = TypeVar("_T")


class Registry(Collection[str], Generic[_T]):
    """Classes of one kind by name. Iterating gives the names: the built-in ones, then those of other packages.

    Args:
        base: The class that they all derive from.
        flag: The flag whose value is the name, for messages.
        builtin: By name, ``module:Class``.
        group: The group of entry points in which other packages declare theirs.

    Example:
        >>> MODES = Registry(Mode, "mode", {"sync": "tfps.modes.synchronous:SyncMode"}, "tfps.modes")
        >>> MODES.load("sync").is_blocking
        True
    """

    def __init__(self, base: type[Any], flag: str, builtin: Mapping[str, str], group: str) -> None:
        self._base, self._flag, self.builtin, self._group = base, flag, builtin, group
        self._loaded: dict[str, _T] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._added()

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from sorted(self._added())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _added(self) -> Mapping[str, metadata.EntryPoint]:
        """Return the entry points of other packages; a built-in name keeps its meaning."""
        found = metadata.entry_points(group=self._group)
        return {entry.name: entry for entry in found if entry.name not in self.builtin}

    def load(self, name: str) -> _T:
        """Return the one instance of a class, which takes no arguments.

        Raises:
            ConfigError: If there is no such name, or what another package gives for it is no such class.
        """
        if name not in self._loaded:
            self._loaded[name] = self._new(name)
        return self._loaded[name]

    def _new(self, name: str) -> _T:
        if path := self.builtin.get(name):
            module, _, attribute = path.partition(":")
            return cast(_T, getattr(importlib.import_module(module), attribute)())
        entry = self._added().get(name)
        if entry is None:
            raise ConfigError(f"--{self._flag}={name} is not one of {', '.join(self)}.")
        source = f"--{self._flag}={name}: {entry.value}, which the package {_package(entry)} declares,"
        try:
            made: _T = entry.load()()
        except Exception as error:
            raise ConfigError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from None
        if not isinstance(made, self._base):
            raise ConfigError(f"{source} is not a {self._base.__module__}.{self._base.__qualname__}.")
        return made


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"
