"""Which variables a step of ``local`` works on, and what becomes of each when a round ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.runtime.graph.passes import side_effects
from tfps.tf_types import Graph, Operation, Variable

_MIXED = (
    "the function of {} draws from a random generator and changes {}: with workers that train on copies, the generator "
    "is shared and the variable is not. Draw the numbers in a function of their own, and pass them to this one."
)


@dataclass(frozen=True)
class State:
    """The variables of which a worker has copies.

    Attributes:
        global_step: The variable of the global step.
        trained: Variables that get a gradient.
        averaged: Other floats that the model changes: the PS hold the mean of the workers' values.
        slots: The optimizer's own variables.
        counted: Other state that the model changes, such as counters.
        fixed: Variables that nothing changes.
    """

    global_step: Variable
    trained: Sequence[Variable]
    averaged: Sequence[Variable]
    slots: Sequence[Variable]
    counted: Sequence[Variable]
    fixed: Sequence[Variable]

    @property
    def exchanged(self) -> Sequence[Variable]:
        """The variables that the workers send when a round ends."""
        return [*self.trained, *self.averaged]

    @property
    def kept(self) -> Sequence[Variable]:
        """The variables whose values stay with a worker from round to round."""
        return [*self.slots, *self.counted]

    @property
    def all(self) -> Sequence[Variable]:
        """All variables of which a worker has copies."""
        return [self.global_step, *self.exchanged, *self.kept, *self.fixed]

    @classmethod
    def of(cls, graph: Graph, trained: Sequence[Variable], model: Sequence[Variable], global_step: Variable) -> "State":
        """Return the state of a step whose gradients have been applied.

        Args:
            graph: The training graph.
            trained: The variables that get a gradient; one may occur more than once.
            model: All saved variables from before the optimizer made its own.
            global_step: The variable of the global step.

        Raises:
            ValueError: If one function draws from a generator and changes something else.
        """
        given = list({variable.ref(): variable for variable in trained}.values())
        seen = {variable.ref() for variable in [*given, global_step]}
        others = [variable for variable in model if variable.ref() not in seen]
        changed, drawn = _changed(graph, others)
        own = [variable for variable in others if variable.op not in drawn]
        averaged = [v for v in own if v.op in changed and v.dtype.is_floating]
        counted = [v for v in own if v.op in changed and not v.dtype.is_floating]
        made = [variable for variable in tf.global_variables() if variable.ref() not in {v.ref() for v in model}]
        fixed = [variable for variable in own if variable.op not in changed]
        return cls(global_step, given, averaged, made, counted, fixed)


def _changed(graph: Graph, variables: Sequence[Variable]) -> tuple[Collection[Operation], Collection[Operation]]:
    """Return the creators of those of some variables that the model changes, and of those it draws random numbers from.

    Their initializers do not count.

    Raises:
        ValueError: If one function does both: it would run where either the generator or the copies are not.
    """
    lasting = side_effects.Lasting(graph)
    first = {variable.initializer for variable in variables}
    changed: set[Operation] = set()
    drawn: set[Operation] = set()
    for op in graph.get_operations():
        makers = {lasting.origin(handle) for handle in lasting.changed(op)} if op not in first else set()
        generators = {lasting.origin(handle) for handle in lasting.drawn(op)} if makers else set()
        mixed = [one.op.name for one in variables if generators and one.op in makers - generators]
        if mixed:
            raise ValueError(_MIXED.format(op.name, " and ".join(mixed)))
        changed |= makers
        drawn |= generators
    return changed, drawn
