"""Passes that rewrite the training graph."""
