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
