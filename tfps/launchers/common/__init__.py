"""Code that several platforms share."""
