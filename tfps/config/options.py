"""How a field of a dataclass is a flag: everything about the flag is declared in the field, once.

The parser, ``--help``, ``to_argv()`` and ``job.json`` derive from these declarations (``command_line``,
``job_config``). The choices of a flag are often the names of a table in a higher package. So a field may name that
table as text, and it is imported when the choices are needed. Must not import TensorFlow.
"""

import dataclasses
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from tfps.config.converters import Converter

_T = TypeVar("_T")
_KEY = "option"


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag; its name is the field's.

    Attributes:
        default: The field's default.
        group: Decides which commands have the flag, and under which heading ``--help`` lists it.
        convert: Parses a value, or raises ``ValueError`` with what would be valid.
        help: Its description in ``--help``.
        choices: The allowed values, or the place of a table with them, like ``tfps.modes.registry:MODES``; ``None`` if
            ``convert`` alone decides.
        feature: What a platform must have for ``tfps submit`` to accept the flag, by the name that launchers list in
            ``Launcher.features``, like ``queues``; ``None`` if every platform accepts it.
        must_agree: Whether all tasks of a job must have the same value (``runtime.coordination.compatibility``).
    """

    default: Any
    group: str
    convert: Converter
    help: str
    choices: Collection[str] | None = None
    feature: str | None = None
    must_agree: bool = False

    def allowed_values(self) -> Collection[str] | None:
        """Return the allowed values, in the order in which messages list them; ``None`` if there is no such list."""
        if isinstance(self.choices, str):
            table: Collection[str] = pkgutil.resolve_name(self.choices)
            return table
        return self.choices


def option(
    default: _T,
    group: str,
    convert: Converter,
    help_text: str,
    *,
    choices: Collection[str] | None = None,
    feature: str | None = None,
    must_agree: bool = False,
) -> _T:
    """Declare a field of a dataclass as a flag; the arguments are the attributes of ``Option``.

    Example::

        mode: str = option("async", "mode", text, "how gradients become updates", choices="tfps.modes.registry:MODES")
    """
    declared = Option(default, group, convert, help_text, choices, feature, must_agree)
    field: _T = dataclasses.field(default=default, metadata={_KEY: declared})
    return field


def mode_option(convert: Converter, help_text: str, choices: Collection[str] | None = None) -> Any:
    """Declare a flag of a mode, on which all tasks must agree; without it, the mode has a default of its own.

    Example::

        staleness: int | None = mode_option(integer(0, INT32_MAX), "ssp: how many steps a worker may be ahead")
    """
    return option(None, "mode", convert, help_text, choices=choices, must_agree=True)


def options_of(kind: type) -> Mapping[str, Option]:
    """Return the declarations of a dataclass's fields by name; all of them must be flags."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind)}


def argument(value: object) -> object:
    """Return a value as a person writes it: 1 for True, 600 for 600.0."""
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer() and value < 2**53)
    return int(value) if is_whole else value  # type: ignore[call-overload]
