"""Prepare this process: before and around TensorFlow."""
