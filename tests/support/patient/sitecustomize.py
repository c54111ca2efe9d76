"""What each Python process of a test loads at its start that has this directory first on its PYTHONPATH.

Stops and replacements may take longer, as on a slow machine. The order of the periods stays as it is.
"""

from tfps import timeouts

_PATIENCE = 3
for _name in (
    *("SAVED_WITHIN_SECS", "PS_GRACE_SECS", "PS_BLOCKED_GRACE_SECS", "TASK_END_SECS", "KILL_AFTER_SECS"),
    *("ORPHANED_SECS", "REPLACED_AFTER_SECS", "REPLACED_AT_END_SECS"),
):
    setattr(timeouts, _name, _PATIENCE * getattr(timeouts, _name))
