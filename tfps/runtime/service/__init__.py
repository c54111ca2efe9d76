"""A parameter service: a server of parameters for clients of any framework."""
