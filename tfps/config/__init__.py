"""The job's options, and how each one is parsed from the command line."""
