"""The workloads, one table: what is trained, how long, and what tells that it was learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

DENSE_STEP = 2.0**-10  # what one push takes off every value of the dense ladder


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark.

    Attributes:
        name: What the table says.
        title: What it is, for people.
        model: ``mnist``, ``narrow``, ``ctr``, ``dense`` or ``null``.
        programs: Who takes part, in the order of the table.
        steps: Updates of the whole job; for a program that counts workers' own steps, steps of each.
        warmup: Updates before the measured time begins.
        mode: ``async`` or ``sync``.
        batch_size: Examples of one worker's step.
        num_ps: Parameter servers.
        num_workers: Workers.
        mb: Of the dense ladder and the null step: 10^6 bytes of parameters.
        rows: Of the null step: how many rows of a table a step reads; 0 is all parameters.
        least: Least accuracy that counts as learned.
        most: Most loss that counts as learned.
        unit: What is reported: ``examples/s``, ``GB/s``, ``ms`` (of a step) or ``s`` (from the command to
            every worker's first step).
        deadline_secs: When a run is ended and called failed.
    """

    name: str
    title: str
    model: str
    programs: Sequence[str]
    steps: int
    warmup: int
    mode: str = "async"
    batch_size: int = 128
    num_ps: int = 1
    num_workers: int = 2
    mb: int = 0
    rows: int = 0
    least: float | None = None
    most: float | None = None
    unit: str = "examples/s"
    deadline_secs: float = 240.0

    @property
    def every(self) -> int:
        """Steps between two marks."""
        return max(1, self.steps // 60)

    def problem(self, metrics: Mapping[str, float]) -> str:
        """Return how the end of a run shows that it has not learned, or nothing."""
        accuracy, loss = metrics.get("accuracy", 0.0), metrics.get("loss", float("inf"))
        if self.least is not None and not accuracy >= self.least:
            return f"accuracy {accuracy:.3f}, less than {self.least:g}"
        if self.most is not None and not loss <= self.most:
            return f"loss {loss:.3f}, more than {self.most:g}"
        if self.model == "null":
            total, due = metrics.get("total", 0.0), -self.steps * DENSE_STEP * self.read
            most = 1 + 2 * self.num_workers / self.steps  # the classic script's workers may take a step or two more
            return "" if 0.999 < total / due < 1.001 * most else f"a sum of {total:g} instead of {due:g}"
        if self.model == "dense":
            values, due = (metrics.get("low"), metrics.get("high")), -self.steps * DENSE_STEP
            return "" if values == (due, due) else f"values {values} instead of {due:g}"
        return ""

    @property
    def read(self) -> int:
        """How many parameters a null step reads."""
        return self.rows * 64 or max(1, self.mb * 10**6 // 4)

    def check(self) -> str:
        """Return what each run must show, for people."""
        if self.model == "null":
            return "the sum of all parameters is what the pushes make of it"
        if self.model == "dense":
            return f"every value is exactly what {self.steps:,} pushes make of it"
        return f"test accuracy >= {self.least:g}" if self.least is not None else f"held-out loss <= {self.most:g}"

    def shorter(self) -> "Workload":
        """Return the same with a third of the steps."""
        return replace(self, steps=self.steps // 3, warmup=self.warmup // 3)


_MNIST = ("tfps", "classic", "torch_tcp", "torch_service")
_MODES = ("tfps_sync", "tfps_ssp", "tfps_local", "tfps_own_rounds", "tfps_allreduce", "tfps_gossip")
_DENSE = ("tfps", "tfps_bf16", "classic", "torch", "torch_tcp", "torch_service", "raw_tcp")
_CTR = ("tfps", "classic", "torch_tcp", "limit")


def _dense(mb: int, steps: int, warmup: int) -> Workload:
    title = f"{mb} MB of float32 in 16 variables, read and pushed whole, 1 PS + 1 worker"
    return Workload(
        f"dense_{mb}", title, "dense", _DENSE, steps, warmup, batch_size=1, num_workers=1, mb=mb, unit="GB/s"
    )


_ALL = (
    Workload(
        "mnist_async",
        "MNIST ConvNet of 1,960 parameters, batch 128, async, 1 PS + 2 workers",
        "mnist",
        (*_MNIST, "torch", "tf2_pss", "tf2_pss_8", "ray", "limit"),
        steps=2_400,
        warmup=800,
        least=0.9,
    ),
    Workload(
        "mnist_sync",
        "the same, sync",
        "mnist",
        (*_MNIST, "ray", "limit"),
        steps=1_200,
        warmup=400,
        mode="sync",
        least=0.9,
    ),
    Workload(
        "narrow",
        "50 residual layers of 16x16 (100 small variables), batch 32, async, 1 PS + 2 workers",
        "narrow",
        ("tfps", "classic", "torch_tcp", "limit"),
        steps=2_400,
        warmup=600,
        batch_size=32,
        most=1.0,
    ),
    Workload(
        "ctr",
        "26 embedding tables of 40,000x16, MLP 64-32, batch 512, async, 1 PS + 2 workers",
        "ctr",
        _CTR,
        steps=750,
        warmup=200,
        batch_size=512,
        most=0.6,
    ),
    Workload(
        "ctr_2ps",
        "the same with 2 PS",
        "ctr",
        _CTR[:-1],
        steps=750,
        warmup=200,
        batch_size=512,
        num_ps=2,
        most=0.6,
    ),
    _dense(1, 900, 180),
    _dense(16, 120, 30),
    _dense(64, 40, 8),
    _dense(256, 20, 4),
    Workload(
        "modes",
        "MNIST ConvNet of 1,960 parameters, batch 128, 2 workers, in each mode: 1 PS where a mode has PS",
        "mnist",
        ("tfps", *_MODES, "mwms", "mwms_8"),
        steps=4_800,
        warmup=1_600,
        least=0.9,
    ),
    Workload(
        "modes_16",
        "16 MB of float32 in 16 variables, the mean of two workers' gradients: 1 PS, or none in allreduce",
        "dense",
        ("tfps_sync", "tfps_allreduce", "mwms"),
        steps=240,
        warmup=60,
        mode="sync",
        batch_size=1,
        mb=16,
        unit="GB/s",
    ),
    Workload(
        "start",
        "from the command to the first step of every worker, MNIST, async, 1 PS + 4 workers",
        "mnist",
        ("tfps", "classic"),
        steps=2_000,
        warmup=0,
        num_workers=4,
        least=0.9,
        unit="s",
    ),
)

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
