"""TensorFlow executes eagerly in a test, whatever the tests before it in the same process have switched off."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest


@contextlib.contextmanager
def eager_execution() -> Iterator[None]:
    """Execute eagerly in this thread, and in those that are started meanwhile."""
    from tensorflow.python.eager import context  # noqa: PLC0415  most tests do without TensorFlow

    context.context().executing_eagerly()  # what this thread has by itself is decided now, and not below
    switches = context._ContextSwitchStack(eager=True)  # by which a function knows what is around it
    with (
        mock.patch.object(context, "default_execution_mode", context.EAGER_MODE),
        mock.patch.object(context.context(), "_context_switches", switches),
        context.eager_mode(),
    ):
        yield


@pytest.fixture(autouse=True)
def _eagerly() -> Iterator[None]:
    """Run each test of a package that imports this fixture eagerly."""
    with eager_execution():
        yield
