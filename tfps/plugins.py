"""Tables of classes by name: those of tfps, and those that other distributions offer through entry points.

A class is imported when it is used, so that the command line can check names without importing their classes. The
offers of other distributions are read when a name is not a built-in one, or when a class is loaded.
"""

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tfps.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")


class Registry(Collection[str], Generic[_T]):
    """Classes of one kind by name. Iteration yields the built-in names, then those of other distributions.

    Args:
        base: Their base class; each class has its name as ``name``, and is created without arguments.
        kind: The kind of the classes, for messages.
        flag: The flag whose value is a name, for messages.
        builtin: By name, ``module:Class``.
        group: The group of entry points in which other distributions offer their classes.

    Example::

        MODES = Registry(Mode, "mode", "mode", {"sync": "tfps.modes.synchronous:SyncMode"}, "tfps.modes")
        MODES.load("sync").is_blocking
    """

    def __init__(self, base: type[Any], kind: str, flag: str, builtin: Mapping[str, str], group: str) -> None:
        self.base, self.builtin, self.group = base, builtin, group
        self._kind, self._flag = kind, flag

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or any(point.name == name for point in self._offered())

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from sorted({point.name for point in self._offered()} - set(self.builtin))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def load(self, name: str) -> _T:
        """Return a new instance of the class with this name.

        Raises:
            ConfigError: If the name is not in the table, more than one distribution offers it, or the offered class
                cannot be imported or used; names the distribution.
        """
        offered = [point for point in self._offered() if point.name == name]
        if len(offered) + (name in self.builtin) > 1:
            others = ", ".join(map(_origin, offered))
            whose = f"tfps itself and {others} offer" if name in self.builtin else f"{others} offer"
            fix = "uninstall one, or rename it"
            raise ConfigError(f"--{self._flag}={name}: {whose} a {self._kind} of this name: {fix}.")
        if not offered and name not in self.builtin:
            raise ConfigError(f"--{self._flag}={name} is not one of {', '.join(self)}.")
        found = self._load_offered(offered[0]) if offered else self._load_builtin(name)
        return found()

    def _offered(self) -> Sequence["EntryPoint"]:
        from importlib import metadata  # noqa: PLC0415  most commands do not need it

        return list(metadata.entry_points(group=self.group))

    def _load_builtin(self, name: str) -> type[_T]:
        module, _, attribute = self.builtin[name].partition(":")
        found: type[_T] = getattr(importlib.import_module(module), attribute)
        return found

    def _load_offered(self, point: "EntryPoint") -> type[_T]:
        """Import the class of an entry point, and check it."""
        source = f"the {self._kind} {point.name} of {_origin(point)}, {point.value},"
        try:
            found: Any = point.load()
        except Exception as error:  # importing a module may raise anything
            fix = "repair that distribution, or uninstall it"
            raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}: {fix}.") from error
        if not (isinstance(found, type) and issubclass(found, self.base)):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{source} is no subclass of {base}: {found!r}.")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
            raise ConfigError(f"{source} lacks {missing}.")
        if getattr(found, "name", None) != point.name:
            own_name = getattr(found, "name", None)
            raise ConfigError(f"{source} has another name, {own_name!r}: handles and summaries have that.")
        return found


def _origin(point: "EntryPoint") -> str:
    """Return a description of the distribution that offers an entry point."""
    return f"the distribution {point.dist.name} {point.dist.version}" if point.dist else "a distribution without a name"
