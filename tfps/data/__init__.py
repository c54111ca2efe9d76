"""Training data: MNIST's IDX files, the digits in the package, and batches of either.

``idx`` and ``digits`` need only numpy; only ``batches`` imports TensorFlow.
"""
