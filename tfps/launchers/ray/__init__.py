"""Ray: a driver, and one actor per task."""
