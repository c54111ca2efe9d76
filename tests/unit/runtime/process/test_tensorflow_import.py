"""Claims about the import of TensorFlow."""

import subprocess
import sys

_LOADED = """
import gc, sys
from tfps.runtime.process import tensorflow_import
finders = list(sys.meta_path)
tensorflow_import.load()
assert "tensorflow.compat.v1" in sys.modules
print([name for name in sys.modules if name.split(".")[0] == "keras"])
assert gc.get_freeze_count() > len(gc.get_objects())
assert gc.isenabled() and set(finders) <= set(sys.meta_path)
assert tensorflow_import._NoKeras not in map(type, sys.meta_path)
import tensorflow
print(tensorflow.keras.layers.Dense(3).units)
"""


def test_keras_comes_when_it_is_used() -> None:
    """TensorFlow is there without any of Keras, which a model finds all the same; nothing else is changed."""
    ended = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n3\n"), ended.stderr
