"""TensorFlow 1.x-style parameter-server training on today's TensorFlow.

A model file needs ``tfps.ModelSpec``, ``tfps.ModeKeys`` and perhaps ``tfps.make_optimizer`` or ``tfps.Examples``; the
command line does everything else. Importing this package does not import TensorFlow.
"""

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.data.examples import Examples
from tfps.errors import TfpsError
from tfps.models.spec import ModeKeys, ModelSpec
from tfps.optimizers.registry import make_optimizer

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Examples",
    "JobConfig",
    "ModeKeys",
    "ModelSpec",
    "Task",
    "TfpsError",
    "__version__",
    "make_optimizer",
]
