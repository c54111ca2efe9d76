"""Modes: how gradients become updates, one module per mode."""
