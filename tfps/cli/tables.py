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
    if plan.kept:
        more = f" and {count(len(plan.kept) - 1)} more" if len(plan.kept) > 1 else ""
        stays = (
            f"{plan.kept[0]}{more}: each worker has its own and does not send them; the ps hold the chief's when saved"
        )
        console.print(stays, markup=False, soft_wrap=True)
    console.print(_servers(plan, holder))
    console.print(_step(plan, holder))
    console.print(_of_job(config, cluster, plan), markup=False, soft_wrap=True)


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
    places = ("ps",) if holder == "ps" else ()  # without ps, all have the same
    table = _table("variables", "name", "shape", "type", "bytes", *places)
    for v in plan.variables:
        place = [str(v.ps)] * len(places)
        table.add_row(v.name, "x".join(map(str, v.shape)) or "scalar", v.dtype, count(v.num_bytes), *place)
    return table


def _servers(plan: "Plan", holder: str) -> Table:
    packed = ("packed",) if any(plan.packed_bytes.values()) else ()
    total = sum(plan.ps_bytes.values()) or 1
    if holder == "ps":
        table = _table("\nparameter servers", "ps", "variables", "bytes", "share", *packed)
    else:
        table = _table("\nthe chief", "variables", "bytes", *packed)
    for ps, size in plan.ps_bytes.items():
        held = str(sum(variable.ps == ps for variable in plan.variables))
        of_packed = [count(plan.packed_bytes.get(ps, 0))] * len(packed)
        row = [str(ps), held, count(size), f"{size / total:.0%}"] if holder == "ps" else [held, count(size)]
        table.add_row(*row, *of_packed)
    return table


def _step(plan: "Plan", holder: str) -> Table:
    before = ("with --wire=plain", "bytes") if plan.plain else ()
    whose = "one worker" if holder == "ps" else "a worker other than the chief"
    title = f"what {whose} gets and sends" if plan.round_pushed else f"one step of {whose}, on the wire"
    table = _table(f"\n{title}", "direction", "tensors", "bytes", *before)
    pull, push = f"pull, {holder} to worker", f"push, worker to {holder}"
    per, step = "a mean" if plan.to_next else "a round", ", a step" if plan.round_pushed else ""
    of_round = [(f"{pull}, {per}", "round_pulled"), (f"{push}, {per}", "round_pushed")] if plan.round_pushed else []
    if plan.waiting_pushed is not None:
        of_round += [(f"{pull}, a round it waits", "waiting_pulled"), (f"{push}, a round it waits", "waiting_pushed")]
    targets = sorted({transfer.target for transfer in plan.to_next})
    for target in targets:
        sent = [transfer for transfer in plan.to_next if transfer.target == target]
        to = target if len(targets) > 1 else "next"
        table.add_row(f"send, worker to {to}{step}", str(len(sent)), _size(sent))
    for name, way in ((f"{pull}{step}", "pulled"), (f"{push}{step}", "pushed"), *of_round):
        ways = [getattr(each, way) for each in (plan, plan.plain) if each]
        table.add_row(name, *(text for transfers in ways for text in (str(len(transfers)), _size(transfers))))
    return table


def _of_job(config: JobConfig, cluster: Cluster, plan: "Plan") -> str:
    """Return what all workers together send in one step, or in one round."""
    mode, workers = registry.mode_of(config), cluster.num_workers
    batches = mode.gradients_per_update(config, workers)
    taking, drawn, per = batches + mode.spare_workers(config), 0, "step"
    rounds = plan.rounds
    if rounds:
        drawn, per = (rounds.drawn, "round") if rounds.are_common else (1, "round of one worker")
        batches = taking = round(sum(rounds.steps) / workers * drawn)
    away = 0 if cluster.ps else 1  # what the chief gets from itself is not sent
    times = [
        (taking, plan.to_next),
        (taking - away * taking // workers, [*plan.pulled, *plan.pushed]),
        (max(drawn - away, 0), [*plan.round_pulled, *plan.round_pushed]),
        (workers - drawn, [*(plan.waiting_pulled or ()), *(plan.waiting_pushed or ())]),
    ]
    sent = [transfer for number, transfers in times for transfer in [*transfers] * number]
    alike = ", if each has as many neighbors" if len({one.target for one in plan.to_next}) > 1 else ""
    trained = f"{count(batches)} {'batch' if batches == 1 else 'batches'}"
    return f"\nbytes of all workers in one {per}, which takes {trained}{alike}: {_size(sent)}"


def _size(transfers: "Sequence[Transfer]") -> str:
    sizes = [transfer.most_bytes if transfer.num_bytes is None else transfer.num_bytes for transfer in transfers]
    known, open_ = count(sum(size or 0 for size in sizes)), sizes.count(None)
    is_exact = all(transfer.num_bytes is not None or transfer.most_bytes is None for transfer in transfers)
    known = known if is_exact else f"at most {known}"
    return f"{known} and {open_} whose size depends on the batch" if open_ else known
