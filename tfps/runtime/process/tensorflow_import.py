"""Import TensorFlow faster than ``import tensorflow`` does, because the import dominates a task's start-up time.

- Keras is imported when it is used. TensorFlow imports all of it at the end, and goes on if that fails; ``tf.keras``
  then imports Keras itself (tensorflow/__init__.py).
- Garbage collection is off during the import, because the objects that an import creates stay. Later collections leave
  them out.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator


def set_environment() -> None:
    """Set the environment variables that TensorFlow reads when it is imported.

    - oneDNN's kernels are on by default only for processors with AVX-512, but are faster on others too. A value that
      the user has set stays.
    - TensorFlow appends the process's log lines of earlier errors to an error (StatusLogSink in platform/status.cc).
      They could be mistaken for its cause: a model's mistake would look like the end of an earlier input.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ["TF_WORKER_NUM_FORWARDED_LOG_MESSAGES"] = "0"


def load() -> None:
    """Import ``tensorflow.compat.v1``, unless TensorFlow is already imported."""
    set_environment()
    if "tensorflow" not in sys.modules:
        with _without_garbage_collection(), _without_keras():
            import tensorflow.compat.v1  # noqa: F401, PLC0415
        gc.freeze()


def load_v1() -> None:
    """Import TensorFlow and make it behave as 1.x, with resource variables."""
    load()
    import tensorflow.compat.v1 as tf  # noqa: PLC0415

    tf.disable_v2_behavior()
    tf.enable_resource_variables()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.enable() if enabled else None


class _NoKeras:
    """An import finder that hides all parts of Keras."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Reject a part of Keras, as a finder of ``sys.meta_path``."""
        del path, target
        if name.startswith("keras."):
            raise ModuleNotFoundError(f"{name} is imported later", name=name)


@contextlib.contextmanager
def _without_keras() -> Iterator[None]:
    finder = _NoKeras()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
