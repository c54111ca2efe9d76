"""What all tests share: the environment in which a task imports TensorFlow."""

import os

from tfps.runtime.process import tensorflow_import

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its pass over each graph is a fifth of so short a job's time
tensorflow_import.set_environment()
