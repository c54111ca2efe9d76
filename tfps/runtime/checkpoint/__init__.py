"""Checkpoints, which are either complete or not there, and the ownership of their directory."""
