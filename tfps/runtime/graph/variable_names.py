"""Find variables whose names do not show which trained variable they are.

Keras numbers the layers of each graph from the start, and TensorFlow the variables without a name or with the same one.
So a name may be that of another layer or variable where a mode leaves one out, or makes them in another order::

    mode="train":  p = Dense(2)   "dense"       mode="eval":  q = Dense(2)   "dense", with the values of p
                   q = Dense(2)   "dense_1"                   p = Dense(2)   "dense_1"
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.models.model import users_lines
from tfps.tf_types import Operation

Problem = tuple[Operation, str]

_DEFAULT_NAME = re.compile(r"(?<![^/])Variable(_[0-9]+)?$")  # TensorFlow's own, without its scope
_NUMBER = re.compile(r"(_[0-9]+)+(?=/|$)")
_FIX = "give each Keras layer and tf.Variable a name of its own"


def ambiguous(mine: Mapping[str, Operation], trained: Mapping[str, Sequence[int]], mode: str) -> Sequence[Problem]:
    """Return variables that may be one of two trained variables, of which a mode has only one.

    Args:
        mine: The variables of the mode's graph by name.
        trained: The shapes of the trained variables, and of others, such as an optimizer's, by name.
        mode: The mode.
    """
    pairs = [*_numbered_layers(trained, mine), *_unnamed(trained, {name: shape_of(op) for name, op in mine.items()})]
    text = (
        "mode='train' has the variables {!r} and {!r}, mode={!r} has only one of them, and their numbers do not show "
    )
    return [(mine[first], f"{text.format(first, other, mode)}which one: {_FIX}") for first, other in pairs]


def swapped(mine: Mapping[str, Operation], theirs: Mapping[str, Operation], mode: str) -> Sequence[Problem]:
    """Return variables that a mode makes where training makes another one, whose name differs by its number only.

    Args:
        mine: The variables of the mode's graph by name.
        theirs: Those of the training graph.
        mode: The mode.
    """
    made: dict[object, list[str]] = {}
    for name, op in theirs.items():
        for place in _places(op):
            made.setdefault(place, []).append(name)
    text = "mode={!r} makes the variable {!r} where mode='train' makes {!r}, in another order: "
    found = []
    for name, op in mine.items():
        others = [one for place in _places(op) for one in _alike(name, made.get(place, []))]
        if others and name in theirs:
            found.append((op, f"{text.format(mode, name, others[0])}{_FIX}"))
    return found


def _places(op: Operation) -> Sequence[tuple[tuple[str, int | None], ...]]:
    """Return where the user's code makes a variable: by all lines of the stack, and by the last one."""
    lines = users_lines(op.traceback or [])
    return [lines, lines[-1:]] if lines else []


def _alike(name: str, there: Sequence[str]) -> Sequence[str]:
    """Return the variables of one place that have another number than ``name``; none if it is among them."""
    return [] if name in there else [one for one in there if _NUMBER.sub("", one) == _NUMBER.sub("", name)]


def _numbered_layers(theirs: Iterable[str], mine: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Return pairs of Keras variables, unnumbered and numbered, of which only the first is in both graphs."""
    if "keras" not in sys.modules:
        return []
    missing = [(re.sub(r"(_[0-9]+)+(?=/)", "", name), name) for name in sorted(set(theirs) - set(mine))]
    return [(first, name) for first, name in missing if first != name and first in mine]


def _unnamed(theirs: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]) -> Iterable[tuple[str, str]]:
    """Return pairs of variables that TensorFlow named, of one shape, of which only the first is in both graphs."""
    missing = [name for name in sorted(theirs.keys() - mine.keys()) if _DEFAULT_NAME.search(name)]
    numbered = [(_DEFAULT_NAME.sub("", name), name) for name in mine if _DEFAULT_NAME.search(name)]
    for other in missing:
        scope = _DEFAULT_NAME.sub("", other)
        yield from [(name, other) for of, name in numbered if of == scope and mine[name] == theirs[other]][:1]


def shape_of(variable: Operation) -> Sequence[int]:
    """Return the shape of a variable, with -1 for an unknown size; empty if all of it is unknown."""
    shape = tf.TensorShape(variable.get_attr("shape"))
    return [] if shape.rank is None else [-1 if size is None else size for size in shape.as_list()]
