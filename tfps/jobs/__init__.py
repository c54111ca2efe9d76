"""A job seen from outside, on any platform: its specification, its events, its status and its display."""
