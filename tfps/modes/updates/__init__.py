"""How an update of several variables counts as one, though workers and PS change them at the same time."""
