"""Clients of a parameter service: any Python program with NumPy. Nothing here imports TensorFlow."""
