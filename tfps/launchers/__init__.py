"""Where jobs run: one file per platform, this one lazy table. Launchers import neither TensorFlow nor the runtime.

A launcher's module has ``plan(config) -> Plan``, pure, and ``submit(plan) -> Handle``; every plan starts its tasks
with ``python -m tfps run`` and the flags of ``JobConfig.to_argv()``.
"""

from collections.abc import Mapping

LAUNCHERS: Mapping[str, str] = {"local": "tfps.launchers.local"}
