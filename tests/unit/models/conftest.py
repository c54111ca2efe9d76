"""Fixtures of the tests of models."""

from support.model_files import own_directory

__all__ = ["own_directory"]
