"""What all tests share: the environment in which a task imports TensorFlow, and an end for long runs of tests."""

import hashlib
import os
import time

import pytest

from tfps.runtime.process import tensorflow_import

UNTIL = os.environ.get("TESTS_UNTIL", "")  # seconds since 1970: when no further test is begun

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its pass over each graph is a fifth of so short a job's time
tensorflow_import.set_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where time may end first, put the files in another order each time."""
    if UNTIL:
        items.sort(key=lambda item: hashlib.sha256(f"{UNTIL} {item.path.name}".encode()).digest())


def pytest_runtest_setup() -> None:
    """Begin no test when the time is over; the report says how many were not run."""
    if UNTIL and time.time() > float(UNTIL):
        pytest.skip("not run: the time for these tests was over")
