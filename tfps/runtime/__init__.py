"""Run one process as one task of a cluster.

This is the only package that imports TensorFlow, apart from the models and modes that it runs.
"""
