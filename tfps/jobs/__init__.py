"""A job as seen from outside, on any platform: what it is, what happens to it, how it is shown."""
