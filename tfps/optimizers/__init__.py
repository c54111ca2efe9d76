"""The optimizers that ``--optimizer`` names."""
