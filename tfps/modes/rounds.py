"""The rounds of a mode whose workers exchange only after several steps of their own. Does not import TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfps.text import count, plural


@dataclass(frozen=True)
class Shares:
    """The workers' shares of the examples, where tfps divides them.

    Attributes:
        sizes: By worker, its number of examples.
        batch_size: How many examples a worker reads for a step, on all its devices.
    """

    sizes: Sequence[int]
    batch_size: int

    def steps(self, passes: int) -> Sequence[int]:
        """Return, by worker, how many steps it takes to read its share so often.

        The last batch may read on in the next pass.
        """
        return [-(-passes * size // self.batch_size) for size in self.sizes]

    def __str__(self) -> str:
        return f"{_range(self.sizes, 'example')}, batches of {count(self.batch_size)}"


@dataclass(frozen=True)
class Rounds:
    """The rounds of a job.

    Attributes:
        steps: By worker, the number of steps that it takes in a full round.
        reason: The flag, and what else decides that number.
        drawn: How many workers train in a round.
        are_common: Whether a round begins and ends for all workers together.
    """

    steps: Sequence[int]
    reason: str
    drawn: int
    are_common: bool = True

    def described(self, max_steps: int | None) -> str:
        """Return the length of a round, and how many of them a new job has that ends at ``max_steps``, if it does."""
        length = f"a round: {_range(self.steps, 'step')} ({self.reason})"
        return length if max_steps is None else f"{length}; --max_steps={max_steps}: {self._number(max_steps)}"

    def _number(self, max_steps: int) -> str:
        most = max(self.steps)  # by so much the global step rises in a round of all workers
        whole, rest = divmod(max_steps, most)
        if not self.are_common:
            return f"about {plural(whole + (rest > 0), 'round')} of each worker"
        if self.drawn < len(self.steps) and min(self.steps) < most:
            return f"at least {plural(whole + (rest > 0), 'round')}"
        last = f"one of {plural(rest, 'step')}" if whole else f"one round of {plural(rest, 'step')}"
        return " and ".join([plural(whole, "round")] * (whole > 0) + [last] * (rest > 0))


def _range(numbers: Sequence[int], noun: str) -> str:
    least, most = min(numbers), max(numbers)
    return plural(most, noun) if least == most else f"{count(least)} to {plural(most, noun)}"
