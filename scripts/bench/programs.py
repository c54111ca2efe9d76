"""The programs that take part, one table: their tasks' commands, environment, and how to read what they say."""

import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes import Task
from workloads import DENSE_STEP, Workload

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODELS = {
    "mnist": "mnist",
    **{name: str(HERE / "models" / f"{name}.py") for name in ("narrow", "ctr", "dense", "null")},
}


@dataclass(frozen=True)
class Place:
    """Where a run finds its data: the arrays' directory, MNIST's IDX files, and a directory for what it leaves."""

    arrays: Path
    mnist: Path
    scratch: Path

    def for_tfps(self, workload: Workload) -> Path:
        """Return what tfps gets as ``--data_dir``."""
        return self.mnist if workload.model == "mnist" else self.arrays


@dataclass(frozen=True)
class Program:
    """A program of the benchmark.

    Attributes:
        title: For the table.
        tasks: Makes the tasks of a run.
        venv: Its virtual environment below ``.venv/bench``; empty for tfps's own.
        env: Environment variables.
        own_steps: Whether its marks count one worker's steps, not the job's.
        lasts: Whether its parameter servers never end by themselves.
        checked: Whether there is something to learn.
        mode: The mode that it trains in, instead of the workload's; of tfps.
        joint: Whether a step is one of each worker in that mode, as in sync.
    """

    title: str
    tasks: Callable[[Workload, Place], Sequence[Task]]
    venv: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    own_steps: bool = False
    lasts: bool = False
    checked: bool = True
    mode: str = ""
    joint: bool = False

    def share_of(self, workload: Workload) -> Workload:
        """Return the workload as this program counts its steps, with as many batches."""
        if not self.joint:
            return workload
        workers = workload.num_workers
        return replace(workload, mode="sync", steps=workload.steps // workers, warmup=workload.warmup // workers)


def in_mode(mode: str, joint: bool = True, **flags: object) -> Program:
    """Return tfps in another mode than the workload's, with flags of that mode.

    Args:
        mode: Its name.
        joint: Whether a step is one of each worker.
        **flags: Flags of the mode.
    """
    given = " ".join(f"--{name}={value}" for name, value in {"mode": mode, **flags}.items())

    def tasks(workload: Workload, place: Place) -> Sequence[Task]:
        num_ps = 0 if mode in ("allreduce", "gossip") else workload.num_ps
        return _tfps(replace(workload, num_ps=num_ps), place, **{"mode": mode, **flags})

    return Program(f"tfps {given}", tasks, mode=mode, joint=joint)


def python(venv: str) -> str:
    """Return the interpreter of a virtual environment."""
    return str(ROOT / ".venv" / "bench" / venv / "bin" / "python") if venv else sys.executable


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _tfps_narrow(workload: Workload, place: Place) -> list[Task]:
    """The same with half the bits on the wire."""
    return _tfps(workload, place, wire="bfloat16")


def _tfps(workload: Workload, place: Place, **more: object) -> list[Task]:
    """One ``tfps run`` a task; where starting is measured, one ``tfps launch``."""
    flags = {
        "model": MODELS[workload.model],
        "data_dir": place.for_tfps(workload),
        "model_dir": place.scratch / "model",
        "mode": workload.mode,
        "batch_size": workload.batch_size,
        "max_steps": workload.steps,
        "steps_to_validate": workload.every,
        **more,
    }
    if workload.unit == "s":
        size = {"num_ps": workload.num_ps, "num_workers": workload.num_workers}
        return [Task("launch", "launch", _command("launch", {**size, **flags}), awaited=True)]
    hosts = [f"127.0.0.1:{port}" for port in free_ports(workload.num_ps + workload.num_workers)]
    flags |= {"ps_hosts": ",".join(hosts[: workload.num_ps])} if workload.num_ps else {}
    flags |= {"worker_hosts": ",".join(hosts[workload.num_ps :])}
    return [
        Task(f"{job}/{i}", job, _command("run", {**flags, "job_name": job, "task_index": i}), job == "worker")
        for job, i in _members(workload)
    ]


def _command(verb: str, flags: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-m", "tfps", verb, *(f"--{name}={value}" for name, value in flags.items())]


def _members(workload: Workload) -> list[tuple[str, int]]:
    servers = [("ps", index) for index in range(workload.num_ps)]
    return servers + [("worker", index) for index in range(workload.num_workers)]


def _peer(
    file: str, venv: str = "", variant: str = "", chief: bool = False, alone: bool = False
) -> Callable[[Workload, Place], Sequence[Task]]:
    """Return what makes the tasks of ``peers/FILE.py``.

    Args:
        file: Its name.
        venv: Its virtual environment.
        variant: Given to it as ``--variant``.
        chief: Whether a third kind of task leads the others; it alone is awaited.
        alone: Whether there is only that task, which starts what it needs.
    """

    def tasks(workload: Workload, place: Place) -> list[Task]:
        members = [] if alone else [m for m in _members(workload) if file not in _WITHOUT_PS or m[0] == "worker"]
        members += [("chief", 0)] if chief else []
        ports = free_ports(workload.num_ps + workload.num_workers + 1)
        shared = _peer_flags(workload, place, MODELS[workload.model] if file == "limit" else variant)
        shared["ports"] = ",".join(map(str, ports))
        made = []
        for job, index in members:
            flags = {**shared, "role": job, "index": index}
            argv = [python(venv), str(HERE / "peers" / f"{file}.py"), *(f"--{k}={v}" for k, v in flags.items())]
            argv = _serve(workload, place, ports, index) if (file, job) == ("torch_service", "ps") else argv
            role = "ray" if alone else "worker" if job == "worker" else "ps"
            made.append(Task(f"{job}/{index}", role, argv, job == ("chief" if chief else "worker")))
        return made

    def _peer_flags(workload: Workload, place: Place, variant: str) -> dict[str, object]:
        names = ("model", "mode", "num_ps", "num_workers", "batch_size", "steps", "every", "mb", "rows")
        data_dir = place.for_tfps(workload) if file == "limit" else place.arrays
        return {**{name: getattr(workload, name) for name in names}, "data_dir": data_dir, "variant": variant}

    return tasks


def _serve(workload: Workload, place: Place, ports: Sequence[int], index: int) -> list[str]:
    """Return the command of a server of parameters for other frameworks, with the optimizer of torch_rpc."""
    rates = {"mnist": ("adagrad", 0.05), "narrow": ("adagrad", 0.02), "dense": ("sgd", DENSE_STEP)}
    optimizer, rate = rates[workload.model]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports[: workload.num_ps])
    flags = {"serve": 1, "ps_hosts": hosts, "task_index": index, "model_dir": place.scratch / "model"}
    flags |= {"num_workers": workload.num_workers} if workload.mode == "sync" else {}
    return _command("run", {**flags, "mode": workload.mode, "optimizer": optimizer, "learning_rate": rate})


_WITHOUT_PS = ("limit", "mwms")

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it for several processes on one machine

PROGRAMS: Mapping[str, Program] = {
    "tfps": Program("tfps", _tfps),
    "tfps_bf16": Program("tfps --wire=bfloat16", _tfps_narrow),
    "tfps_sync": in_mode("sync"),
    "tfps_ssp": in_mode("ssp", joint=False, staleness=3),
    "tfps_local": in_mode("local", sync_every=20),
    "tfps_own_rounds": in_mode("local", sync_every=20, async_rounds=1),
    "tfps_allreduce": in_mode("allreduce"),
    "tfps_gossip": in_mode("gossip", topology="ring"),
    "mwms": Program("MultiWorkerMirroredStrategy", _peer("mwms", "", "1"), env=_QUIET, joint=True),
    "mwms_8": Program(
        "MultiWorkerMirroredStrategy, 8 steps a function", _peer("mwms", "", "8"), env=_QUIET, joint=True
    ),
    "classic": Program("classic TF1 script", _peer("classic"), env=_QUIET, lasts=True),
    "torch": Program("PyTorch RPC", _peer("torch_rpc", "torch"), "torch", env=_ONE_THREAD),
    "torch_tcp": Program("PyTorch RPC, TCP", _peer("torch_rpc", "torch", "tcp"), "torch", env=_ONE_THREAD),
    "torch_service": Program(
        "tfps service with PyTorch",
        _peer("torch_service", "torch"),
        "torch",
        env={**_ONE_THREAD, "PYTHONPATH": str(ROOT)},
        lasts=True,
    ),
    "tf2_pss": Program("TF2 ParameterServerStrategy", _peer("tf2_pss", "", "1", chief=True), env=_QUIET, lasts=True),
    "tf2_pss_8": Program("TF2 PSS, 8 steps a function", _peer("tf2_pss", "", "8", chief=True), env=_QUIET, lasts=True),
    "ray": Program("Ray's example", _peer("ray_ps", "ray", chief=True, alone=True), "ray", env=_ONE_THREAD),
    "raw_tcp": Program("raw TCP", _peer("raw_tcp"), checked=False),
    "limit": Program(
        "limit: no PS at all", _peer("limit"), env={**_QUIET, "TF_ENABLE_ONEDNN_OPTS": "1"}, own_steps=True
    ),
}


def environment(program: Program, workload: Workload) -> dict[str, str]:
    """Return the environment variables of a run."""
    size = {"TFPS_BENCH_MB": str(workload.mb), "TFPS_BENCH_ROWS": str(workload.rows)}
    return {**program.env, **size, "RAY_USAGE_STATS_ENABLED": "0"}


def metrics(name: str, place: Place, said: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return what a run's model is worth: tfps's summary, or what a program said at the end."""
    if name.startswith("tfps"):
        summary = place.scratch / "model" / "summary.json"
        told = json.loads(summary.read_text())["eval"] if summary.exists() else {}
    else:
        told = next((event for event in said if event["event"] == "done"), {})
    return {key: value for key, value in told.items() if isinstance(value, (int, float))}


def missing(names: Sequence[str]) -> list[str]:
    """Return the virtual environments that programs need and that are not there."""
    return sorted(venv for venv in {PROGRAMS[name].venv for name in names} - {""} if is_missing(venv))


def is_missing(venv: str) -> bool:
    """Return whether a virtual environment is not there."""
    return not Path(python(venv)).exists()
