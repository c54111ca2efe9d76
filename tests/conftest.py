"""What all tests share: the environment in which a task imports TensorFlow."""

from tfps.runtime.process import tensorflow_import

tensorflow_import.set_environment()
