"""Slurm: who is in a step, where its nodes are, and how Slurm writes lists. Does not import TensorFlow."""
