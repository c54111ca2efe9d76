"""TensorFlow 1.x-style parameter-server training on today's TensorFlow.

A model file needs ``tfps.ModelSpec``, ``tfps.ModeKeys`` and perhaps ``tfps.make_optimizer``; everything else is the
command line's. Importing this package does not import TensorFlow.
"""

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import TfpsError
from tfps.models.optimizers import make_optimizer
from tfps.models.spec import ModeKeys, ModelSpec

__version__ = "0.1.0"

__all__ = ["Cluster", "JobConfig", "ModeKeys", "ModelSpec", "Task", "TfpsError", "__version__", "make_optimizer"]
