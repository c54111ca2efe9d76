"""What a model file provides, how it is loaded, and the built-in models."""
