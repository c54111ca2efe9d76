"""The classic script of ``scripts/bench``, as its users run it where tasks may be lost: with checkpoints.

In sync its chief waits at the end for a background thread that nobody ends, for two minutes unless told otherwise.

Its model is one scalar that each step adds 2^-10 to, its input comes by ``control``, and it tells every step.
"""

from collections.abc import Iterator
from typing import Any

import classic  # of scripts/bench/peers, as is task
import control
import numpy as np
import task
import tensorflow.compat.v1 as tf

SAVE_SECS = 1
STOP_GRACE_SECS = 3
_session = classic.session


class Marks:
    """Tells every step as tfps does."""

    def __init__(self, every: int, steps: int) -> None:
        del every, steps

    def at(self, step: int) -> None:
        """Tell that ``step`` steps are done."""
        print(f"step={step} loss=0", flush=True)


def batches(flags: Any) -> Iterator[Any]:
    """Yield inputs as slowly as a fault wants them."""
    control_files = control.Control(flags.data_dir, flags.index)
    for _ in range(control_files.batches()):
        yield np.float32(control_files.value() / 2.0**flags.index), np.float32(0)


def session(server: Any, flags: Any, hooks: list[Any]) -> Any:
    """Return the session that trains; the chief's saves to ``--variant``, and goes on from there."""
    if flags.index:
        return _session(server, flags, hooks)
    return tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=True,
        checkpoint_dir=flags.variant,
        save_checkpoint_secs=SAVE_SECS,
        save_summaries_secs=None,
        save_summaries_steps=None,
        log_step_count_steps=None,
        stop_grace_period_secs=STOP_GRACE_SECS,
        hooks=hooks,
        config=classic.session_config(flags),
    )


if __name__ == "__main__":
    classic.session, task.batches, task.Marks = session, batches, Marks
    classic.main()
