"""What the fork server of ``tfps launch`` imports first: TensorFlow, once for all tasks."""

from tfps.runtime import loading

loading.load()
