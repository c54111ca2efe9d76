"""The parameters of one server: their values, the optimizer, and what they were a moment ago."""
