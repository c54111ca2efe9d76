"""The command line: one module per command. The only package that prints for users or exits."""
