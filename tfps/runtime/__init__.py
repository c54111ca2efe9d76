"""One process = one task of a cluster. The only folder, with the models and modes it runs, that imports TensorFlow.

TensorFlow has oneDNN's kernels on by default only for processors with AVX-512; they are faster on others too. And it
appends to an error what a process has logged of earlier ones (StatusLogSink in platform/status.cc), from which the
cause of this one could be told wrongly: the end of an earlier input makes a model's mistake look like one of the data.
"""

import os

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ["TF_WORKER_NUM_FORWARDED_LOG_MESSAGES"] = "0"
