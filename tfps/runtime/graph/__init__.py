"""Build the graphs of a job."""
