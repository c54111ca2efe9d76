"""Rewrites of the training graph."""
