"""Modes that train as ``sync`` and ``async`` do, in jobs without PS: the chief holds what a PS would hold."""

from tfps.modes.asynchronous import AsyncMode
from tfps.modes.synchronous import SyncMode


class SyncWithoutPs(SyncMode):
    """``--mode=sync_without_ps``."""

    name = "sync_without_ps"
    uses_ps = False


class AsyncWithoutPs(AsyncMode):
    """``--mode=async_without_ps``."""

    name = "async_without_ps"
    uses_ps = False
