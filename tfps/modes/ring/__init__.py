"""The parts of ``allreduce``."""
