"""This machine: what ``tfps launch`` does."""
