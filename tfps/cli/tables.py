"""The tables that ``tfps plan`` and ``tfps status`` print. Drawn with rich; does not import TensorFlow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfps.cluster.spec import Cluster
from tfps.config.converters import INT64_MAX
from tfps.config.devices import requested
from tfps.config.job_config import JobConfig
from tfps.modes import registry
from tfps.text import count, plural

if TYPE_CHECKING:
    from tfps.jobs.handle import Status
    from tfps.runtime.graph.placement import Transfer
    from tfps.runtime.graph.plan import Plan


def print_plan(config: JobConfig, cluster: Cluster, plan: "Plan") -> None:
    """Print each variable's PS, the bytes on each PS, and what a step sends."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=160)
    asked = requested(config.devices_per_worker)
    each = f" of {asked.count} {asked.kind}s" if (asked.count or 1) > 1 else ""
    workers = f"{plural(cluster.num_workers, 'worker')}{each}"
    title = f"{config.model} on {cluster.num_ps} ps and {workers}, --mode={registry.described(config)}\n"
    if plan.rounds:
        title += plan.rounds.described(None if config.max_steps == INT64_MAX else config.max_steps) + "\n"
    console.print(title, markup=False, soft_wrap=True)
    holder = "ps" if cluster.ps else "chief"
    console.print(_variables(plan, holder))
    console.print(_servers(plan, holder))
    console.print(_step(plan, holder))


def print_status(handle: str, status: "Status") -> None:
    """Print what a platform reports about a job."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=1000)
    console.print(f"{handle}  {status.state}{f': {status.reason}' if status.reason else ''}", markup=False)
    table = _table("", "task", "state", "exit code", "restarts", "where", "why")
    for column in table.columns[4:]:
        column.justify = "left"
    for task, known in status.tasks.items():
        code = "" if known.exit_code is None else str(known.exit_code)
        table.add_row(str(task), known.state, code, str(known.restarts), escape(known.where), escape(known.reason))
    if status.tasks:
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _variables(plan: "Plan", holder: str) -> Table:
    table = _table("variables", "name", "shape", "type", "bytes", holder)
    for v in plan.variables:
        table.add_row(v.name, "x".join(map(str, v.shape)) or "scalar", v.dtype, count(v.num_bytes), str(v.ps))
    return table


def _servers(plan: "Plan", holder: str) -> Table:
    table = _table(
        "\nparameter servers" if holder == "ps" else "\nthe chief, without ps",
        holder,
        "variables",
        "bytes",
        "share",
        "packed",
    )
    total = sum(plan.ps_bytes.values()) or 1
    for ps, size in plan.ps_bytes.items():
        held = sum(variable.ps == ps for variable in plan.variables)
        table.add_row(str(ps), str(held), count(size), f"{size / total:.0%}", count(plan.packed_bytes.get(ps, 0)))
    return table


def _step(plan: "Plan", holder: str) -> Table:
    before = ("with --wire=plain", "bytes") if plan.plain else ()
    whose = "one worker" if holder == "ps" else "a worker other than the chief"
    table = _table(f"\none step of {whose}, on the wire", "direction", "tensors", "bytes", *before)
    pull, push = f"pull, {holder} to worker", f"push, worker to {holder}"
    per = "a mean" if plan.to_next else "a round"
    of_round = [(f"{pull}, {per}", "round_pulled"), (f"{push}, {per}", "round_pushed")] if plan.round_pushed else []
    if plan.waiting_pushed is not None:
        of_round += [(f"{pull}, a round it waits", "waiting_pulled"), (f"{push}, a round it waits", "waiting_pushed")]
    targets = sorted({transfer.target for transfer in plan.to_next})
    for target in targets:
        sent = [transfer for transfer in plan.to_next if transfer.target == target]
        table.add_row(f"send, worker to {target if len(targets) > 1 else 'next'}", str(len(sent)), _size(sent))
    for name, way in ((pull, "pulled"), (push, "pushed"), *of_round):
        ways = [getattr(each, way) for each in (plan, plan.plain) if each]
        table.add_row(name, *(text for transfers in ways for text in (str(len(transfers)), _size(transfers))))
    return table


def _size(transfers: "Sequence[Transfer]") -> str:
    known = count(sum(transfer.num_bytes or 0 for transfer in transfers))
    open_ = sum(transfer.num_bytes is None for transfer in transfers)
    return f"{known} and {open_} whose size depends on the batch" if open_ else known
