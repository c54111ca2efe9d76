"""Training data: MNIST's IDX files, the digits in the package, and batches of either.

``examples``, ``order`` and ``stream`` divide the examples of a model that lets tfps do so. Only ``batches`` and
``stream`` import TensorFlow.
"""
