"""How gradients become updates: one module per mode."""
