"""Agreement of a job's tasks, through the parameter servers."""
