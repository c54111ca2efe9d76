"""What ``--mode=local`` is made of: the worker's copies, the exchange, and the optimizer on the PS."""
