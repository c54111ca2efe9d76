"""Where training data comes from: MNIST's IDX files, the digits that the package carries, and batches of either.

``idx`` and ``digits`` need numpy alone; only ``batches`` imports TensorFlow.
"""
