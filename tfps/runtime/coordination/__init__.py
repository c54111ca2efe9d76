"""What the tasks of a job agree on, through the parameter servers."""
