"""One process = one task of a cluster. The only folder, with the models and modes it runs, that imports TensorFlow.

TensorFlow has oneDNN's kernels on by default only for processors with AVX-512; they are faster on others too.
"""

import os

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
