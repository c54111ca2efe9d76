"""Several steps in one ``session.run``: copies of a step's operations, each after the one before it.

Each run costs one call per task and a clean-up, whatever its size, so several short steps per run are faster. A
``tf.while_loop`` across tasks would send its condition to each of them in each iteration. Copies send nothing.

Copies share resources: variables, iterators, tables, queues, accumulators. Each use of a resource waits for all its
uses in the step before, on the task of the resource, so nothing crosses the wire for it. A copy thus reads the current
values of its PS, including other workers' updates, as a separate run would. Calls of Python and prints keep the order
of the steps, too. If steps wait for other workers, a batch is read one step ahead, and no earlier: a run that breaks
off must not skip batches. Each copy draws other random numbers, also in the functions that it calls.

Control edges are drawn as ``|`` and ``v``::

    before   step              read v --> gradient --> apply to v
    after    step (copy 0)     read v --> gradient --> apply to v
                                  |                        |
                                  '-----------+------------'  all uses of v
                                              v
             tfps/step_1       read v --> gradient --> apply to v     the edges end at both uses
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import tensorflow.compat.v1 as tf

from tfps.modes.updates.moments import RUN_ID
from tfps.runtime.graph.cancel_safe_iterator import INPUTS
from tfps.runtime.graph.graph_editor import (
    add_control_inputs,
    data_users,
    is_handle,
    is_in_control_flow,
    is_in_every_step,
    order,
)
from tfps.runtime.graph.passes import side_effects
from tfps.runtime.graph.passes.functions import nodes_within
from tfps.runtime.graph.placement import ancestors, task_of
from tfps.runtime.graph.towers.nodes import NodeCopies
from tfps.tf_types import Fetch, Graph, Operation, Tensor

_SEED_STRIDE = 1_000_003
_SCOPE = "tfps/step_"
_TURNS = "tfps/acts/"
_MADE_IN_EACH_RUN = ("Anonymous", "TemporaryVariable")  # beginnings of the types of operations
_FUNCTIONAL = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")
_ENTERS = ("Enter", "RefEnter")
_CONTROL = (*_ENTERS, "Switch", "RefSwitch")
_BRANCHES = (*("Switch", "RefSwitch", "If", "StatelessIf", "Case", "StatelessCase"), *("While", "StatelessWhile"))
_DEEPER = {"Enter": 1, "RefEnter": 1, "Exit": -1, "RefExit": -1}


class UnrolledStep:
    """Copies of a step, created on demand.

    Args:
        graph: The graph of the step, to which the copies are added.
        fetches: The tensors and operations that form the step.
        gate: Operations of a step that all uses of PS resources in the next step must wait for. The worker's input
            waits for those of the step before.
        apart: Whether the step itself does not run with its copies. Then the first copy waits for nothing.
        shown: Tensors read for all copies of a run, or for none. Calls of Python and prints that only they need do not
            run otherwise.

    Attributes:
        in_order: Whether the copies are equivalent to the step. False if a branch of ``tf.cond`` or a loop uses a
            resource and the end of this use is unknown. Also false if an operation has state that its copies do not
            share.
        keeps_order: Whether runs have to follow each other, because steps change state on the worker, or call Python.
        size: The number of operations in a step.
    """

    def __init__(
        self,
        graph: Graph,
        fetches: Sequence[Fetch],
        gate: Sequence[Operation] = (),
        apart: bool = False,
        shown: Sequence[Tensor] = (),
    ) -> None:
        self._graph, self._gate, self._apart = graph, [op.name for op in gate], apart
        ops = ancestors([*fetches, *shown])
        kept = {op for op in ops if lasts(op)}
        self._ops = [op for op in sorted(ops, key=order) if op not in kept]
        self.size = len(self._ops)
        self._nodes = NodeCopies(graph, self._ops, _SCOPE, _SEED_STRIDE)
        used = {tensor.name for op in self._ops for tensor in op.inputs}
        self._shared = {tensor.name: tensor for op in kept for tensor in op.outputs if tensor.name in used}
        first: dict[object, str] = {}
        self._resource = {n: first.setdefault(side_effects.identity_of(t.op), n) for n, t in self._shared.items()}
        self._passed_on = self._handles_passed_on()
        self._copies: list[dict[str, Operation]] = [{op.name: op for op in self._ops}]
        self._acts = {op for op in self._ops if side_effects.acts(op)}
        self._acts_if_shown = {op.name for op in self._acts - set(ancestors(fetches))}
        hidden = any(side_effects.has_hidden_state(op) or _draws_in_control_flow(op) for op in self._ops)
        branched = any(is_in_control_flow(op) for op in self._acts)
        self.in_order = not (branched or hidden) and all(self._ends(op) for op in self._ops if self._uses(op))
        own = [op for op in self._ops if any(self._is_workers(name) for name in self._lasting(op))]
        several = sum(op.type in INPUTS for op in self._ops) > 1  # a step needs the same index from all
        self.keeps_order = several or hidden or bool(self._acts) or any(side_effects.changes(op) for op in own)

    def _lasting(self, op: Operation) -> Sequence[str]:
        """Return the names of the resources that an operation uses, directly or passed on by another operation."""
        found = [name for tensor in op.inputs for name in self._passed_on.get(tensor.name, ())]
        found += [tensor.name for tensor in op.inputs if tensor.name in self._shared and is_handle(tensor)]
        return list(dict.fromkeys(self._resource[name] for name in found))

    def _handles_passed_on(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the resources behind each handle that an operation of the step returns, by tensor name.

        ``tf.assign_add`` on a non-resource variable returns the variable itself, which is read when it is used. Inputs
        of loops and branches are not included: see ``_ends``.
        """
        found: dict[str, Sequence[str]] = {}
        for op in (op for op in self._ops if op.type not in _CONTROL):
            names = [t.name for t in op.inputs if t.name in self._shared and is_handle(t)]
            names += [name for tensor in op.inputs for name in found.get(tensor.name, ())]
            found |= {tensor.name: names for tensor in op.outputs if names and is_handle(tensor)}
        return found

    def _uses(self, op: Operation) -> Sequence[str]:
        """Return the names of everything an operation waits for: its resources, and its turn to act."""
        return [*self._lasting(op), *([f"{_TURNS}{task_of(op)}"] if op in self._acts else [])]

    def _is_workers(self, name: str) -> bool:
        """Return whether a used resource is on the worker. A function may use some that are and some that are not."""
        place = task_of(self._shared[name].op) if name in self._shared else name.removeprefix(_TURNS)
        return place.startswith("worker/")

    def copy(self, index: int) -> Callable[[Fetch], Fetch]:
        """Return a function from a tensor or operation of the step to that of copy ``index``; copy 0 is the step."""
        while len(self._copies) <= index:
            self._add()
        ops = self._copies[index]

        def find(of: Fetch) -> Fetch:
            if isinstance(of, tf.Operation):
                return ops.get(of.name, of)
            return ops[of.op.name].outputs[of.value_index] if of.op.name in ops else of

        return find

    def _add(self) -> None:
        number = len(self._copies)
        wanted = self._nodes.definition(number)
        with self._graph.as_default(), tf.device(None), tf.control_dependencies(None):
            names = [op.name for op in self._ops]
            made = tf.import_graph_def(wanted, self._shared, names, name=f"{_SCOPE}{number}")
        copy = dict(zip(names, made, strict=True))
        if number > 1 or not self._apart:
            self._put_after(copy, self._copies[-1])
        if number > 1:
            self._hold_input_back(copy, self._copies[-2])
        self._copies.append(copy)

    def _put_after(self, copy: dict[str, Operation], before: dict[str, Operation]) -> None:
        """Make each use of a resource in one copy wait for all uses in the copy before."""
        users: dict[str, list[str]] = defaultdict(list)
        for op in self._ops:
            for name in self._uses(op):
                users[name].append(op.name)
        gate = [before[name] for name in self._gate]
        for used, names in users.items():
            # Acts that run only if shown do not hold back the others: an edge from them would make them run in every
            # step.
            for if_shown in (False, True):
                first = [name for name in names if if_shown or name not in self._acts_if_shown]
                ends = [before[end] for name in first for end in self._ends(self._copies[0][name])]
                before_it = list(dict.fromkeys(ends if self._is_workers(used) else [*gate, *ends]))
                for name in names:
                    if (name in self._acts_if_shown) is if_shown:
                        add_control_inputs(copy[name], before_it)

    def _hold_input_back(self, copy: dict[str, Operation], before: dict[str, Operation]) -> None:
        """Let a copy read its batch only after the gate of the copy two steps earlier.

        So a run that is interrupted loses at most two batches. The step before still hides the time of the read.
        """
        gate = [before[name] for name in self._gate]
        for op in self._ops if gate else ():
            if op.type in INPUTS and is_in_every_step(op):
                add_control_inputs(copy[op.name], gate)

    def _ends(self, op: Operation) -> Sequence[str]:
        """Return the names of the operations that end an operation's use of its resources; empty if unknown.

        This is the operation itself. For one that enters a loop, it is the operations through which its input leaves
        the loop. They do not wait for a change of the resource in the loop, whose iterations may run at the same time.
        TensorFlow turns an ``If`` or ``While`` into branches and loops of which control edges reach a part.
        """
        if op.type in _BRANCHES:
            return []
        if op.type not in _ENTERS:
            return [op.name]
        todo, ends = [(op, 1)], []
        seen = {op}
        for inner, depth in todo:  # grows during the loop
            for user in data_users(inner):
                level = depth + _DEEPER.get(user.type, 0)
                if user.name not in self._copies[0] or user in seen:
                    continue
                if (side_effects.changes(user) or user.type in INPUTS) and any(map(is_handle, inner.outputs)):
                    return []
                seen.add(user)
                if level:
                    todo.append((user, level))
                else:
                    ends.append(user.name)
        return ends


def copy_number(name: str) -> int:
    """Return the number of the copy that contains an operation of that name; 0 is the step itself."""
    named = re.match(rf"{_SCOPE}(\d+)[/_]", name)
    return int(named[1]) if named else 0


def lasts(op: Operation) -> bool:
    """Return whether an operation is the same in every step: its output outlives the step, or never changes.

    An operation whose output outlives a step has a name by which others can share it, or no inputs.
    """
    if op.type in ("Const", "Placeholder") or op.name == RUN_ID:
        return not op.control_inputs
    if op.type.startswith(_MADE_IN_EACH_RUN):
        return False
    is_shared = "shared_name" in op.node_def.attr or not op.inputs
    return is_shared and any(is_handle(tensor) for tensor in op.outputs)


def _draws_in_control_flow(op: Operation) -> bool:
    """Return whether a function that an operation calls draws random numbers in a condition or a loop of its own.

    TensorFlow inlines that function (``session.config_of``), but not the branches and bodies in it. Their generators
    have a state of their own in each graph of a session, so runs of different lengths would repeat numbers.
    """
    nodes = nodes_within(op.graph, op.node_def)
    return any(node.op in _FUNCTIONAL and side_effects.draws(op.graph, node) for node in nodes)
