"""The roles of a task, and the training loop."""
