"""Local SGD: workers train on their own copies and exchange them now and then. ``local.step`` has the operations."""

import importlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.modes.rounds import Rounds, Shares
from tfps.tf_types import Optimizer, Tensor, Variable

DEFAULT_SYNC_EVERY = 10
_ADAPTIVE = ("adam", "adagrad")
_WITH_MOMENTUM = ("momentum", "nesterov", "adam")


class LocalMode(Mode):
    """Workers train alone for ``--sync_every`` steps, or ``--local_epochs``; then the PS take their mean change."""

    name: ClassVar[str] = "local"
    is_blocking: ClassVar[bool] = True
    trains_on_copies: ClassVar[bool] = True
    flags: ClassVar[Collection[str]] = (
        *("sync_every", "local_epochs", "server_optimizer", "server_learning_rate", "server_momentum"),
        *("worker_fraction", "async_rounds", "data_policy"),
    )

    def of_job(self, config: JobConfig) -> Mode:
        """Return the variant in which nobody waits, if the job has ``--async_rounds``."""
        return _OF_OWN_ROUNDS if config.async_rounds else self

    def defaults(self, config: JobConfig) -> Mapping[str, object]:
        """Return the values of flags that are shown with the mode if they are not given."""
        length = {} if config.local_epochs else {"sync_every": DEFAULT_SYNC_EVERY}
        return {**length, "server_optimizer": "sgd"}

    def gradients_per_update(self, config: JobConfig, num_workers: int) -> int:
        """Return the number of workers that train in a round."""
        return workers_per_round(config, num_workers)

    def rounds(self, config: JobConfig, num_workers: int, shares: Shares | None) -> Rounds:
        """Return the rounds, each of which ends with an exchange."""
        return rounds_of(config, num_workers, shares)

    def why_idle(self, config: JobConfig, num_workers: int, num_idle: int) -> str:
        """Return that some workers were not drawn, where rounds have a sample of them."""
        if workers_per_round(config, num_workers) == num_workers:
            return super().why_idle(config, num_workers, num_idle)
        who = "it was" if num_idle == 1 else "they were"
        return f"{who} not drawn for a round (--worker_fraction={config.worker_fraction:g})"

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return an error for an optimizer of the PS that lacks a rate, or for a momentum that it does not use."""
        del num_workers
        optimizer, problems = config.server_optimizer or "sgd", []
        if optimizer in _ADAPTIVE and config.server_learning_rate is None:
            problems.append(f"--server_optimizer={optimizer} needs --server_learning_rate, such as 0.01: add it.")
        if optimizer not in _WITH_MOMENTUM and config.server_momentum is not None:
            given, users = f"--server_momentum={config.server_momentum:g}", " or ".join(_WITH_MOMENTUM)
            problems.append(f"{given} is for --server_optimizer={users}: give one of them, or leave it out.")
        if (config.server_momentum or 0.0) >= 1:
            problems.append(f"--server_momentum={config.server_momentum:g} must be less than 1, such as 0.9.")
        if config.async_rounds and config.worker_fraction is not None:
            problems.append(
                f"--worker_fraction={config.worker_fraction:g} chooses workers for a common round, and with "
                "--async_rounds=1 there is none: leave one of them out."
            )
        return [*problems, *_of_epochs(config), *_of_data(config)]

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``local.step``. Its tickets number the steps of this worker."""
        step: Step = importlib.import_module("tfps.modes.local.step").build(optimizer, loss, global_step, context)
        return step


def _of_epochs(config: JobConfig) -> Sequence[str]:
    """Return an error for each flag that gives a round another length than ``--local_epochs``."""
    given = f"--local_epochs={config.local_epochs}"
    others = [f"--sync_every={config.sync_every}"] if config.sync_every else []
    others += ["--async_rounds=1"] if config.async_rounds else []
    if not config.local_epochs or not others:
        return []
    why = "a round is as many steps as a worker's share takes"
    return [f"{given} is not for {' or '.join(others)}: {why}. Leave one of them out."]


def _of_data(config: JobConfig) -> Sequence[str]:
    """Return an error for a flag with which workers take different numbers of batches, beside ``--data_policy``."""
    fraction, others = config.worker_fraction, []
    others += ["--async_rounds=1"] if config.async_rounds else []
    others += [f"--worker_fraction={fraction:g}"] if fraction is not None and fraction < 1 else []
    others += [f"--local_epochs={config.local_epochs}"] if config.local_epochs else []
    if not config.data_policy or not others:
        return []
    why = "workers would take different numbers of batches, and no checkpoint could tell which"
    return [f"--data_policy={config.data_policy} is not for {' or '.join(others)}: {why}. Leave one of them out."]


class _OfOwnRounds(LocalMode):
    """``local`` with ``--async_rounds``: a worker brings its change when its own round has ended."""

    is_blocking: ClassVar[bool] = False

    @property
    def can_overlap(self) -> bool:
        """Return that a worker has one run in flight: its next step needs the copies that this one changes."""
        return False

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``local.async_rounds``. Its tickets number the steps of this worker."""
        rounds = importlib.import_module("tfps.modes.local.async_rounds")
        step: Step = rounds.build(optimizer, loss, global_step, context)
        return step


_OF_OWN_ROUNDS = _OfOwnRounds()


def sync_every(config: JobConfig) -> int:
    """Return ``--sync_every``, or its default."""
    return config.sync_every or DEFAULT_SYNC_EVERY


def rounds_of(config: JobConfig, num_workers: int, shares: Shares | None) -> Rounds:
    """Return the rounds of a job: ``--sync_every`` steps, or what ``--local_epochs`` take; see ``Mode.rounds``."""
    drawn, epochs = workers_per_round(config, num_workers), config.local_epochs
    if epochs is None:
        every = sync_every(config)
        return Rounds([every] * num_workers, f"--sync_every={every}", drawn, are_common=not config.async_rounds)
    if shares is None:
        raise ValueError(f"--local_epochs={epochs} needs a model that returns tfps.Examples: leave it out.")
    return Rounds(shares.steps(epochs), f"--local_epochs={epochs} of {shares}", drawn)


def steps_per_round(context: ModeContext) -> int:
    """Return how many steps a full round of the worker has."""
    return rounds_of(context.config, context.cluster.num_workers, context.shares).steps[context.task.index]


def workers_per_round(config: JobConfig, num_workers: int) -> int:
    """Return how many workers train in a round: ``--worker_fraction`` of them, at least one."""
    return max(1, math.ceil((config.worker_fraction or 1.0) * num_workers - 1e-9))
