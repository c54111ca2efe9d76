"""Names for TensorFlow's types in annotations. TensorFlow has no type stubs, so the type checker sees ``Any``.

Does not import TensorFlow, so that modules which must not import it can name its types.
"""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
"""``tf.Tensor`` of a graph."""

Operation: TypeAlias = Any
"""``tf.Operation``."""

Variable: TypeAlias = Any
"""``tf.Variable``; a resource variable unless stated otherwise."""

Gradient: TypeAlias = Any
"""``tf.Tensor`` or ``tf.IndexedSlices``."""

Optimizer: TypeAlias = Any
"""``tf.compat.v1.train.Optimizer``."""

Graph: TypeAlias = Any
"""``tf.Graph``."""

Session: TypeAlias = Any
"""``tf.compat.v1.Session``, or ``runtime.process.session.Session``."""

Fetch: TypeAlias = Any
"""An argument of ``Session.run``: a tensor, an operation, or a structure of them."""

Dataset: TypeAlias = Any
"""``tf.data.Dataset``."""

DType: TypeAlias = Any
"""``tf.DType``."""

Shape: TypeAlias = Any
"""``tf.TensorShape``."""

Initializer: TypeAlias = Any
"""An initializer of ``tf.get_variable``: a function of shape, type and partition, a class of one, or a tensor."""

NodeDef: TypeAlias = Any
"""``tf.NodeDef``: the definition of an operation."""

FunctionDef: TypeAlias = Any
"""``FunctionDef``: the definition of a function of a graph."""

FuncGraph: TypeAlias = Any
"""``FuncGraph``: the body of a function, as a graph."""

InputIterator: TypeAlias = Any
"""``CancelSafeIterator``, or an initializable iterator of ``tf.data``."""

InputContext: TypeAlias = Any
"""``tf.distribute.InputContext``: which worker of how many reads the input."""

Saver: TypeAlias = Any
"""``tf.compat.v1.train.Saver``."""

FileWriter: TypeAlias = Any
"""``tf.compat.v1.summary.FileWriter``: writes an event file."""

Context: TypeAlias = Any
"""A context manager of TensorFlow."""

Nested: TypeAlias = Any
"""A structure of ``tf.nest``: a tensor, or tuples and dicts of them, such as the features of a model."""
