"""The interface of model files, their loader, and the built-in models."""
