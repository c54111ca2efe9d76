"""The job as one frozen value: each field of ``JobConfig`` is a flag and declares everything about it (``options``).

Must not import TensorFlow.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfps.config.converters import INT32_MAX, INT64_MAX, boolean, directory, integer, number, number_from, text
from tfps.config.devices import devices
from tfps.config.options import Option, argument, mode_option, option, options_of
from tfps.config.topology import topology

_OF_STARTER = ("size", "ports", "restarts")  # the groups of flags that only the starter of the tasks needs


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """All options of a job. Immutable; ``None`` means that the flag was not given."""

    ps_hosts: str | None = option(
        None, "cluster", str, "addresses of the parameter servers: host:port,host:port", feature="addresses"
    )
    worker_hosts: str | None = option(
        None, "cluster", str, "addresses of the workers; the first is the chief", feature="addresses"
    )
    job_name: str | None = option(None, "task", str, "this task's role: ps, worker or evaluator")
    task_index: int | None = option(
        None, "task", integer(-INT64_MAX - 1, INT64_MAX), "this task's index in its role, from 0"
    )
    num_ps: int | None = option(
        None,
        "size",
        integer(0, 4096),
        "number of parameter servers (default 1; 0 in a mode without); in a Slurm step, its first tasks",
    )
    num_workers: int | None = option(
        None, "size", integer(1, 4096), "number of workers (default 2, or the number in the given cluster)"
    )
    port_base: int | None = option(
        None,
        "ports",
        integer(1, 65535),
        "Slurm: first port used on each node (default 8888; when submitted, from the job id); launch --serve: that of "
        "the first PS (default: free ones)",
        feature="ports",
    )
    model: str = option("linear", "job", text, "a .py file, a dotted module, or a built-in model", must_agree=True)
    data_dir: str = option("", "job", text, "path or URL of the data; without it, the model's built-in data")
    model_dir: str | None = option(
        None,
        "job",
        directory,
        "directory of checkpoints, event files, logs and the summary; the same directory resumes the job",
    )
    batch_size: int = option(128, "job", integer(1, INT32_MAX), "examples per worker and step")
    seed: int = option(
        1, "job", integer(0, INT32_MAX), "seed of the shuffling and of the initial weights", must_agree=True
    )
    partition: str | None = option(
        None,
        "training",
        text,
        "the shares of the workers: even (of like examples) or label (of few classes each, as in federated learning); "
        "for models that return tfps.Examples (default even)",
        choices=("even", "label"),
        must_agree=True,
    )
    learning_rate: float | None = option(
        None, "training", number(0), "the optimizer's step size (default: the model's own)", must_agree=True
    )
    optimizer: str | None = option(
        None,
        "training",
        text,
        "optimizer, instead of the model's own",
        choices="tfps.optimizers.registry:OPTIMIZERS",
        must_agree=True,
    )
    max_steps: int = option(
        1000,
        "training",
        integer(1, INT64_MAX),
        "the global step at which training is done, counted over all runs; no default with --serve",
        must_agree=True,
    )
    epochs: int | None = option(
        None,
        "training",
        integer(1, INT32_MAX),
        "with --data_policy: how many times each example is read, counted over all runs, and then training is done; "
        "--max_steps has no default then",
        must_agree=True,
    )
    steps_to_validate: int = option(100, "training", integer(1, INT64_MAX), "global steps between progress lines")
    save_checkpoint_secs: float = option(60.0, "training", number(0), "seconds between checkpoints")
    on_nan: str = option(
        "stop",
        "training",
        text,
        "on a NaN or Inf loss or gradient: stop (exit code 66) or skip the batch; it is never applied",
        choices=("stop", "skip"),
    )
    force: bool = option(
        False,
        "training",
        boolean,
        "take --model_dir over from the job that holds it; that job then stops with an error",
    )
    mode: str = option(
        "async", "mode", text, "how gradients become updates", choices="tfps.modes.registry:MODES", must_agree=True
    )
    issync: bool | None = option(None, "mode", boolean, "1 is --mode=sync, 0 is --mode=async")
    backup_workers: int | None = mode_option(
        integer(0, 4095),
        "sync: an update takes the first gradients and does not wait for those of this many workers (default 0)",
    )
    aggregate: str | None = mode_option(
        text,
        "sync: how the gradients of an update are combined (default mean)",
        choices=("mean", "sum", "median", "trimmed_mean", "krum"),
    )
    staleness: int | None = mode_option(
        integer(0, INT32_MAX),
        "ssp: how many steps a worker may be ahead of the slowest one when it begins a step (default 3)",
    )
    sync_every: int | None = mode_option(
        integer(1, INT32_MAX),
        "local: how many steps a worker takes between two exchanges with the parameter servers (default 10)",
    )
    local_epochs: int | None = mode_option(
        integer(1, INT32_MAX),
        "local: instead of --sync_every, how often a worker reads its share of the examples between two exchanges; for "
        "models that return tfps.Examples",
    )
    server_optimizer: str | None = mode_option(
        text,
        "local: how the parameter servers take the mean change of the workers (default sgd, which averages them)",
        choices=("sgd", "momentum", "nesterov", "adam", "adagrad"),
    )
    server_learning_rate: float | None = mode_option(number(0), "local: the rate of --server_optimizer (default 1)")
    server_momentum: float | None = mode_option(
        number_from(0), "local: momentum of --server_optimizer, or adam's beta1 (default 0.9)"
    )
    worker_fraction: float | None = mode_option(
        number(0, 1), "local: the part of the workers that trains in each round (default 1)"
    )
    topology: str | None = mode_option(
        topology,
        "gossip: who mixes with whom: ring, complete, exponential, or a file with an edge a line (default ring)",
    )
    collect_every: int | None = mode_option(
        integer(1, INT32_MAX),
        "gossip: after how many steps the chief takes the mean of all copies, which is what is saved (default 100)",
    )
    async_rounds: bool | None = mode_option(
        boolean, "local: each worker exchanges when its own round ends, and waits for no other"
    )
    staleness_lr: bool | None = mode_option(
        boolean, "async: divide the learning rate of an update by the staleness of its gradient"
    )
    delay_compensation: float | None = mode_option(
        number(0),
        "async: lambda of DC-ASGD, such as 0.04: correct a stale gradient for how the parameters have changed since",
    )
    data_policy: str | None = mode_option(
        text,
        "for models that return tfps.Examples: shard gives each worker a share of the examples, dynamic gives more to "
        "faster workers, and a resumed job goes on in its epoch (default: as the model divides them)",
        choices=("shard", "dynamic"),
    )
    serve: bool = option(
        False,
        "service",
        boolean,
        "serve parameters to clients of any framework (tfps.connect) instead of training a model; --num_workers is how "
        "many clients an update of sync needs",
    )
    worker_timeout_secs: float = option(
        30.0,
        "service",
        number(0),
        "with --serve: seconds without a connection after which a client loses its place in an update",
    )
    tls_cert: str | None = option(
        None,
        "service",
        text,
        "with --serve: file of the servers' TLS certificate, PEM; without it, nothing is encrypted",
    )
    tls_key: str | None = option(
        None, "service", text, "with --serve: file of the private key of --tls_cert, PEM without a password"
    )
    tls_ca: str | None = option(
        None,
        "service",
        text,
        "with --tls_cert: file of the certificates, PEM, by which the servers check each other (default: the system's)",
    )
    ps_strategy: str = option(
        "greedy",
        "placement",
        text,
        "how variables are spread over the parameter servers",
        choices=("greedy", "round_robin"),
        must_agree=True,
    )
    min_slice_mb: float = option(
        64.0,
        "placement",
        number(0),
        "split variables over the parameter servers in slices of at least this size",
        must_agree=True,
    )
    devices_per_worker: str | None = option(
        None,
        "placement",
        devices,
        "the first N GPUs of each worker, each with a batch of its own in a step, or cpu:N for N logical CPU devices "
        "(default: all GPUs of the worker)",
    )
    tower_updates: str | None = option(
        None,
        "placement",
        text,
        "with several devices in a worker: the model's own updates, such as batch norm's averages, are those of the "
        "first device's batch, or of all in turn (default first)",
        choices=("first", "all"),
        must_agree=True,
    )
    wire: str = option(
        "packed",
        "performance",
        text,
        "how tensors are sent: packed (small ones together), bfloat16 (packed, half the bytes), plain (one by one)",
        choices=("packed", "bfloat16", "plain"),
        must_agree=True,
    )
    steps_per_run: int | None = option(
        None, "performance", integer(1, 64), "steps per session.run (default: measured during the first steps)"
    )
    runs_in_flight: int | None = option(
        None,
        "performance",
        integer(1, 8),
        "async: concurrent session.run calls per worker; more means staler gradients (default: measured)",
    )
    start_timeout_secs: float | None = option(
        None,
        "timeouts",
        number(0),
        "seconds to wait for the other tasks; then exit with code 171 and name the missing tasks "
        "(default 60; submitted jobs 600, Compose 120)",
    )
    stall_timeout_secs: float = option(
        600.0,
        "timeouts",
        number(0),
        "seconds without a step, or an evaluation batch, after which a task exits with code 172",
    )
    max_restarts: int | None = option(
        None,
        "restarts",
        integer(0, 1000),
        "maximum restarts of each task that is lost or exits with code 128 or more; exit code 170 after another task "
        "was lost does not count (default: 5 for launch, 10 for submitted jobs, 0 for run)",
    )

    def replace(self, **changes: Any) -> "JobConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def patience_secs(self) -> float:
        """How long a task waits for the others, in seconds."""
        return self.start_timeout_secs or 60.0

    def for_task(self, **changes: Any) -> "JobConfig":
        """Return a copy without the options that only the starter of the tasks needs."""
        others = {name: option.default for name, option in OPTIONS.items() if option.group in _OF_STARTER}
        if self.serve:  # no address tells the number of clients, and there is no model
            others |= {"num_workers": self.num_workers}
            changes |= {"model": OPTIONS["model"].default}
        return self.replace(**{**others, **changes})

    def to_argv(self) -> list[str]:
        """Return the command line that reproduces this config: ``--name=value`` for each non-default field."""
        given = {name: value for name, value in self.to_dict().items() if value != OPTIONS[name].default}
        if self.epochs or self.serve:  # which change the default
            given |= {"max_steps": self.max_steps}
            given = {name: value for name, value in given.items() if (name, value) != ("max_steps", INT64_MAX)}
        return [f"--{name}={argument(value)}" for name, value in given.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain JSON values."""
        return dataclasses.asdict(self)


OPTIONS: Mapping[str, Option] = options_of(JobConfig)
