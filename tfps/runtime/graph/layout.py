"""The place of each variable. Each worker builds a separate graph, and all workers have to agree on the places.

A variable is found on a PS by its name. A worker's model may create its variables in another order than the chief's.
The worker may then expect a variable on another PS, or at another place in a packed variable. It would train the wrong
values without a message. So the chief stores its layout on the PS, and every worker compares its layout with it before
it takes a step.
"""

from collections.abc import Mapping

from tfps.cluster import rendezvous
from tfps.errors import ModelError
from tfps.models.model import Model
from tfps.runtime.graph.checks.variable_check import kind
from tfps.runtime.graph.passes.snapshot import Place
from tfps.runtime.graph.placement import VARIABLES, holds_state, task_of
from tfps.tf_types import Graph

_SHOWN = 2
_OWN = "tfps/"  # variables that are the same on all workers, or exist only on some
_FIX = (
    "every worker must create the same variables in the same order and from the same file (the order of a set differs "
    "between processes: sort it)"
)

Layout = Mapping[str, str]


def of(graph: Graph, places: Mapping[str, Place]) -> Layout:
    """Return the type, shape and place of each variable on a PS, by its name.

    Args:
        graph: A training graph.
        places: Maps the name of a packed variable to its place.
    """
    ops = [op for op in graph.get_operations() if op.type in VARIABLES and not op.name.startswith(_OWN)]
    on_ps = {op.name: op for op in ops if holds_state(op)}
    return {name: f"{kind(op)} on {task_of(op)}{_part(places.get(f'{name}:0'))}" for name, op in on_ps.items()}


def check(mine: Layout, chiefs: Layout, model: Model) -> None:
    """Check that a worker expects each variable where the chief has it.

    Raises:
        ModelError: If not. The message names variables with both places.
    """
    odd = [name for name, where in mine.items() if chiefs.get(name, where) != where]
    if odd:
        misplaced = rendezvous.first_few(
            [f"{name!r} is {mine[name]}, the chief's {chiefs[name]}" for name in odd], _SHOWN
        )
        raise ModelError(f"--model={model.name}: {model.line_of('model_fn')}: variable {misplaced}: {_FIX}.")


def _part(place: Place | None) -> str:
    if place is None:
        return ""
    sizes = [int(part.shape.num_elements()) for part in place.parts]
    return f", from element {sum(sizes[: place.index]):,} of {sum(sizes):,} in {place.whole.op.name}"
