"""The click model on PyTorch RPC: each server holds its fields' tables merged into one, the first also the MLP.

A worker asks for unique rows only, and gives one gradient for each. Adagrad updates the rows in place.
"""

import threading
from typing import Any

import task
import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional

FIELDS, ROWS, SIZE, RATE, FIRST_SQUARES = 26, 40_000, 16, 0.05, 0.1


class Server:
    """Some fields' rows, their sums of squared gradients, and on the first server the MLP."""

    def __init__(self, flags: Any) -> None:
        count = len(fields_of(flags.index, flags.num_ps))
        self._rows = torch.randn(count * ROWS, SIZE) * 0.05
        self._squares = torch.full_like(self._rows, FIRST_SQUARES)
        self._mlp = list(make_mlp().parameters()) if flags.index == 0 else []
        self._optimizer = torch.optim.Adagrad(self._mlp, RATE, initial_accumulator_value=0.1) if self._mlp else None
        self._lock, self._step = threading.Lock(), 0

    def step(self, pushed: Any, wanted: Any) -> tuple[int, Any, list[Any]]:
        """Apply a worker's gradients, if there are any; returns the updates so far, rows wanted and the MLP."""
        with self._lock:
            if pushed is not None:
                self._update(*pushed)
            return self._step, self._rows[wanted], [parameter.detach().clone() for parameter in self._mlp]

    def _update(self, ids: Any, gradient: Any, mlp: list[Any]) -> None:
        squares = self._squares[ids] + gradient * gradient
        self._squares[ids] = squares
        self._rows.index_add_(0, ids, gradient * squares.rsqrt(), alpha=-RATE)
        for parameter, its_gradient in zip(self._mlp, mlp, strict=True):
            parameter.grad = its_gradient
        if self._optimizer:
            self._optimizer.step()
        self._step += 1


_served: list[Server] = []


def start_server(flags: Any) -> None:
    """Make this process a server."""
    _served.append(Server(flags))


def serve_step(pushed: Any, wanted: Any) -> Any:
    """Run ``step`` of the server in this process."""
    return _served[0].step(pushed, wanted)


def fields_of(index: int, num_ps: int) -> range:
    """Return the fields that a server holds."""
    return range(FIELDS * index // num_ps, FIELDS * (index + 1) // num_ps)


def make_mlp() -> Any:
    """Return the MLP on top of the rows."""
    layers = [nn.Linear(FIELDS * SIZE, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)]
    for layer in layers[::2]:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Batch:
    """A batch's clicks, and for each server the unique rows it needs and where they go."""

    def __init__(self, x: Any, y: Any, num_ps: int) -> None:
        self.clicks, self.wanted, self.places = torch.from_numpy(y), [], []
        for server in range(num_ps):
            fields = fields_of(server, num_ps)
            ids = torch.from_numpy(x[:, fields.start : fields.stop]).long() + torch.arange(len(fields)) * ROWS
            unique, place = torch.unique(ids, return_inverse=True)
            self.wanted.append(unique)
            self.places.append(place)

    def loss(self, rows: list[Any], mlp: Any) -> Any:
        """Return the mean cross entropy."""
        looked_up = [part[place].flatten(1) for part, place in zip(rows, self.places, strict=True)]
        logits = mlp(torch.cat(looked_up, dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, self.clicks)


class Worker:
    """A worker's side of a step."""

    def __init__(self, flags: Any) -> None:
        self._servers = [f"ps{index}" for index in range(flags.num_ps)]
        self._mlp = make_mlp()
        self._parameters = list(self._mlp.parameters())
        self.done = 0
        self._rows: list[Any] = []

    def exchange(self, pushed: list[Any], batch: Batch) -> None:
        """Push to every server, and take what the next batch needs."""
        calls = [
            rpc.rpc_async(server, serve_step, args=given)
            for server, given in zip(self._servers, zip(pushed, batch.wanted, strict=True), strict=True)
        ]
        answers = [call.wait() for call in calls]
        self.done = answers[0][0]
        self._rows = [rows.requires_grad_() for _, rows, _ in answers]
        for parameter, value in zip(self._parameters, answers[0][2], strict=True):
            parameter.data, parameter.grad = value, None

    def gradients(self, batch: Batch) -> list[Any]:
        """Compute what to push for a batch."""
        self.loss(batch).backward()
        mlp = [[parameter.grad for parameter in self._parameters], *[[]] * (len(self._servers) - 1)]
        return [(ids, rows.grad, dense) for ids, rows, dense in zip(batch.wanted, self._rows, mlp, strict=True)]

    def loss(self, batch: Batch) -> Any:
        """Return the loss of a batch at the parameters last taken."""
        return batch.loss(self._rows, self._mlp)


def work(flags: Any) -> None:
    """Train, then let the first worker evaluate."""
    worker, marks, batches = Worker(flags), task.Marks(flags.every, flags.steps), task.batches(flags)
    batch, pushed = Batch(*next(batches), flags.num_ps), [None] * flags.num_ps
    while True:
        worker.exchange(pushed, batch)
        marks.at(worker.done)
        if worker.done >= flags.steps:
            break
        following = Batch(*next(batches), flags.num_ps)
        pushed, batch = worker.gradients(batch), following
    if flags.index == 0:
        held_out = Batch(task.load(flags, "eval_x"), task.load(flags, "eval_y"), flags.num_ps)
        worker.exchange([None] * flags.num_ps, held_out)
        task.say("done", loss=worker.loss(held_out).item())
