"""Manifests as text: YAML whose strings every reader takes as strings.

Readers of YAML 1.1 and 1.2, PyYAML, Go's and libyaml's differ on the meaning of ``no``, ``1e3`` or ``012``; they all
read quoted strings alike.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_OTHER_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # in YAML 1.1, which reads the first one as a plain line end
_NOT_STRINGS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that is not a plain word; writes texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        """Indent lists, as people do."""
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Write a repeated value in full each time."""
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_STRINGS
    block = text.endswith("\n") and len(text.splitlines()) > 1 and not _OTHER_LINE_ENDS.search(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "|" if block else '"')


_Dumper.add_representer(str, _string)


def to_yaml(documents: Sequence[Mapping[str, Any]], comment: str = "") -> str:
    """Return objects as YAML documents, without a final line end; the lines of ``comment`` come first."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return head + text.removesuffix("\n")  # any other belongs to a text
