"""The parts of ``sync``."""
