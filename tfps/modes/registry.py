"""The modes by name. Does not import TensorFlow."""

import functools

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode
from tfps.plugins import Registry

MODES: Registry[Mode] = Registry(
    Mode,
    "mode",
    "mode",
    {"async": "tfps.modes.asynchronous:AsyncMode", "sync": "tfps.modes.synchronous:SyncMode"},
    "tfps.modes",
)


_load = functools.cache(MODES.load)


def mode_of(config: JobConfig) -> Mode:
    """Return the mode in which a job trains.

    Raises:
        ConfigError: If the mode is from another package and cannot be loaded.
    """
    return _load(config.mode)
