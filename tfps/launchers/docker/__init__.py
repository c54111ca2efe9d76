"""Docker: a Compose file on one machine."""
