"""The parts of ``gossip``."""
