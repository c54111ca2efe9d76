"""What the user asked for: the job's options, and how each one is read from the command line."""
