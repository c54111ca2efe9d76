"""Find out which tasks form the cluster and which of them respond. Does not import TensorFlow."""
