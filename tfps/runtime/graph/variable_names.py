"""Find variables whose names do not show which trained variable they are.

Keras numbers the layers of each graph from the start, and TensorFlow the variables without a name or with the same one.
So a name may be that of another layer or variable where a mode leaves one out, or makes them in another order::

    mode="train":  p = Dense(2)   "dense"       mode="eval":  q = Dense(2)   "dense", with the values of p
                   q = Dense(2)   "dense_1"                   p = Dense(2)   "dense_1"
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

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

    Only numbers that Keras or TensorFlow has given count, and only if both lines make a variable in each mode.

    Args:
        mine: The variables of the mode's graph by name.
        theirs: Those of the training graph.
        mode: The mode.
    """
    here, there = _by_line(mine), _by_line(theirs)
    own_line = {name: line for line, names in there.items() for name in names}
    text = "mode={!r} makes the variable {!r} where mode='train' makes {!r}, in another order: "
    found = []
    for line, names in here.items():
        for name in names if own_line.keys() >= set(names) else []:
            alike = [other for other in there.get(line, []) if _NUMBER.sub("", other) == _NUMBER.sub("", name)]
            if alike and name not in alike and own_line[name] in here:
                found.append((mine[name], f"{text.format(mode, name, alike[0])}{_FIX}"))
    return found


def _by_line(variables: Mapping[str, Operation]) -> Mapping[object, Sequence[str]]:
    """Return the names of the variables that TensorFlow or Keras has numbered by the user's line that made them."""
    found: dict[object, list[str]] = {}
    kinds = _kinds_of_layers()
    for name, op in variables.items():
        frames = op.traceback or []
        lines = users_lines(frames)
        if lines and _is_numbered(name, {frame.name for frame in frames}, kinds):
            found.setdefault(lines[-1], []).append(name)
    return found


def _is_numbered(name: str, functions: Collection[str], kinds: Collection[str]) -> bool:
    """Return whether a variable's number may be TensorFlow's or Keras's own, by the functions that made it."""
    if "get_variable" in functions:
        return False
    is_of_layer = "add_weight" in functions
    return not is_of_layer or any(part in kinds for part in _NUMBER.sub("", name).split("/"))


def _kinds_of_layers() -> Collection[str]:
    """Return the names that Keras gives to layers, without numbers, such as "conv2d" and "leaky_re_lu".

    The rule is that of Keras (``to_snake_case`` in keras/src/utils/naming.py).
    """
    if "keras" not in sys.modules:
        return ()
    todo = [sys.modules["keras"].layers.Layer]
    for kind in todo:  # grows during the loop
        todo += [one for one in kind.__subclasses__() if one not in todo]
    words = [re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", kind.__name__)) for kind in todo]
    return {re.sub(r"([a-z])([A-Z])", r"\1_\2", each).lower() for each in words}


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
