"""The tests here execute TensorFlow eagerly, as the servers of a parameter service do."""

from support.eager import _eagerly

__all__ = ["_eagerly"]
