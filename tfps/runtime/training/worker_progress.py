"""The progress of one worker, as its loop counts it."""

import time
from dataclasses import dataclass, field

from tfps.runtime.coordination.stragglers import WorkerPace


@dataclass
class Progress:
    """The progress of a worker.

    Attributes:
        steps: Steps that this worker has taken.
        batches: How many of these steps have a known batch size.
        examples: How many examples were in these batches.
        loss: The loss of its last step.
        global_step: The global step after its last step.
        began: Monotonic time when training began, in seconds.
        last_step: Monotonic time of its last step's end.
        input_ended: Whether the input has ended, of this worker or of one that trains in step with it.
        skipped: Batches that led to no step because their loss or gradient was NaN or Inf.
        waited_secs: For how long this worker waited for others before its last step, all its waits together.
        is_waiting: Whether it waits for others now.
    """

    steps: int = 0
    batches: int = 0
    examples: int = 0
    global_step: int = 0
    loss: float | None = None
    began: float = field(default_factory=time.monotonic)
    last_step: float = 0.0
    input_ended: bool = False
    skipped: int = 0
    waited_secs: float = 0.0
    is_waiting: bool = False

    @property
    def batch_size(self) -> float:
        """The mean number of examples in a batch of this worker; 0 before the first."""
        return self.examples / self.batches if self.batches else 0.0

    @property
    def seconds(self) -> float:
        """For how many seconds this worker has been taking steps."""
        return max(self.last_step - self.began, 1e-9)

    def count(self, step: int, loss: float, examples: int, ended: float) -> None:
        """Count a step: the global step that it has reached, its loss, its examples, and when it ended."""
        self.batches, self.examples, self.steps = self.batches + 1, self.examples + examples, self.steps + 1
        self.global_step, self.loss, self.last_step = max(step, self.global_step), loss, ended

    def take_back(self, global_step: int) -> None:
        """Count steps no more that come after a global step."""
        lost = max(0, self.global_step - global_step)
        self.steps, self.global_step = self.steps - lost, self.global_step - lost

    def go_on_from(self, global_step: int) -> None:
        """Continue at a global step: a worker's copies may have had steps that the variables lack."""
        self.take_back(global_step)
        self.global_step = global_step

    def beat(self) -> WorkerPace:
        """Return this progress as a heartbeat."""
        when = time.time() - (time.monotonic() - self.last_step) if self.last_step else 0.0
        counts = (self.skipped, self.batches, self.examples)
        waits = (self.waited_secs, self.is_waiting)
        return WorkerPace(self.steps, self.global_step, when, self.seconds, *counts, *waits)
