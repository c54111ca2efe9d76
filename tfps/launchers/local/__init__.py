"""This machine: the platform of ``tfps launch``."""
