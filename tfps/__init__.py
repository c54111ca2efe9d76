"""TensorFlow 1.x-style parameter-server training on today's TensorFlow.

A model file needs ``tfps.ModelSpec``, ``tfps.ModeKeys`` and perhaps ``tfps.make_optimizer`` or ``tfps.Examples``; the
command line does everything else. A program of another framework needs ``tfps.connect``, and perhaps ``tfps.serve``.
Importing this package imports neither TensorFlow nor NumPy: each name is loaded when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfps.client.client import Client
    from tfps.client.connect import connect
    from tfps.client.serve import serve
    from tfps.cluster.spec import Cluster, Task
    from tfps.config.job_config import JobConfig
    from tfps.data.examples import Examples
    from tfps.errors import TfpsError
    from tfps.models.spec import ModeKeys, ModelSpec
    from tfps.optimizers.registry import make_optimizer

__version__ = "0.1.0"

__all__ = [
    "Client",
    "Cluster",
    "Examples",
    "JobConfig",
    "ModeKeys",
    "ModelSpec",
    "Task",
    "TfpsError",
    "__version__",
    "connect",
    "make_optimizer",
    "serve",
]

_MODULES = {
    "Client": "tfps.client.client",
    "Cluster": "tfps.cluster.spec",
    "Examples": "tfps.data.examples",
    "JobConfig": "tfps.config.job_config",
    "ModeKeys": "tfps.models.spec",
    "ModelSpec": "tfps.models.spec",
    "Task": "tfps.cluster.spec",
    "TfpsError": "tfps.errors",
    "connect": "tfps.client.connect",
    "make_optimizer": "tfps.optimizers.registry",
    "serve": "tfps.client.serve",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value
