"""One process = one task of a cluster.

With the models and modes that it runs, the only package that imports TensorFlow.
"""
