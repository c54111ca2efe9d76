"""One process = one task of a cluster. The only folder, with the models and modes it runs, that imports TensorFlow."""
