"""What is checked of a model: its graph, and the variables that it creates."""
