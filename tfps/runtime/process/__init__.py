"""Prepare this process, before TensorFlow is imported and around it."""
