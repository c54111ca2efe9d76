"""Who is in the cluster, and who answers there. Does not import TensorFlow."""
