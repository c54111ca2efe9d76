"""Several devices in a worker: one copy of the model a device, of which a step takes the mean."""
