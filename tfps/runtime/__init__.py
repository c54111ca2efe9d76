"""Run one process as one task of a cluster.

Apart from the models, modes, optimizers and data that it uses, only this package imports TensorFlow.
"""
