"""Checkpoints: complete, or not there at all; and whose directory they are in."""
