"""What is compared: every mode of the registry, those with flags as the table says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.config.job_config import JobConfig
from tfps.modes.registry import MODES, mode_of

FLAGS: Mapping[str, Sequence[Mapping[str, int | str]]] = {  # of a mode that is not here: without flags
    "sync": ({}, {"backup_workers": 1}),
    "ssp": ({"staleness": 3}, {"staleness": 500}),  # one that a slow worker reaches at once, one never in a run
    "local": ({"sync_every": 20}, {"sync_every": 20, "async_rounds": 1}),
    "gossip": ({"topology": "ring"}, {"topology": "complete"}),
}


@dataclass(frozen=True)
class Candidate:
    """A mode with its flags.

    Attributes:
        mode: The value of ``--mode``.
        flags: Its other flags, by name.
    """

    mode: str
    flags: Mapping[str, int | str]

    @property
    def name(self) -> str:
        """What the table and the picture say: ``sync --backup_workers=1``."""
        return " ".join([self.mode, *(f"--{name}={value}" for name, value in self.flags.items())])

    @property
    def config(self) -> JobConfig:
        """The job's options of the group ``mode``."""
        return JobConfig(mode=self.mode).replace(**self.flags)

    @property
    def num_ps(self) -> int:
        """Parameter servers: one, or none in a mode without."""
        return int(mode_of(self.config).uses_ps)

    def batches_per_step(self, num_workers: int) -> int:
        """Return the number of batches that count for a global step."""
        return mode_of(self.config).gradients_per_update(self.config, num_workers)

    def max_steps(self, batches: int, num_workers: int) -> int:
        """Return the global step at which a job has trained on a number of batches, or on the few more of its step."""
        return -(-batches // self.batches_per_step(num_workers))


def candidates(modes: Sequence[str]) -> list[Candidate]:
    """Return the candidates of modes, in the order of the registry."""
    return [Candidate(mode, flags) for mode in MODES.builtin if mode in modes for flags in FLAGS.get(mode, ({},))]
