"""How gradients become updates: one file per mode, this one table.

A mode's module has ``build(optimizer, loss, global_step, config, cluster, task) -> Step`` (see ``base.py``).
This file does not import TensorFlow.
"""

from collections.abc import Mapping

MODES: Mapping[str, str] = {"async": "tfps.modes.asynchronous", "sync": "tfps.modes.synchronous"}
