"""A parameter server on ``torch.distributed.rpc``, after PyTorch's own tutorials on it.

One call per step gives gradients and takes fresh parameters. Asynchronous: applied under a lock as they come.
Synchronous: the server answers all workers when the last gradient is in (``async_execution``). ``--variant=tcp`` keeps
the tensors off shared memory, as between machines.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import task
import torch
import torch_ctr
import torch_models
from torch.distributed import rpc

RATES = {"mnist": 0.05, "narrow": 0.02}


class Server:
    """Holds the parameters, and an optimizer for them."""

    def __init__(self, flags: Any) -> None:
        self._model = torch_models.build(flags)
        self._parameters = list(self._model.parameters())
        self._optimizer = self._make_optimizer(flags)
        self._wanted = flags.num_workers if flags.mode == "sync" else 1
        self._lock, self._received, self._step = threading.Lock(), 0, 0
        self._answer: torch.futures.Future[Any] = torch.futures.Future()

    def _make_optimizer(self, flags: Any) -> Any:
        if flags.model == "dense":
            return torch.optim.SGD(self._parameters, lr=task.DENSE_RATE)
        return torch.optim.Adagrad(self._parameters, lr=RATES[flags.model], initial_accumulator_value=0.1)

    def pull(self) -> tuple[int, list[Any]]:
        """Return the number of updates, and the parameters."""
        return self._step, [parameter.detach() for parameter in self._parameters]

    def push(self, gradients: Sequence[Any]) -> Any:
        """Take a worker's gradients; the future's value is as ``pull``'s, after the update that they are part of."""
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient if not self._received else parameter.grad.add_(gradient)
            self._received += 1
            answer = self._answer
            if self._received == self._wanted:
                self._update()
                answer.set_result(self.pull())
        return answer

    def _update(self) -> None:
        if self._wanted > 1:
            for parameter in self._parameters:
                parameter.grad /= self._wanted
        self._optimizer.step()
        self._step, self._received, self._answer = self._step + 1, 0, torch.futures.Future()


_served: list[Server] = []


def serve_pull() -> Any:
    """Run ``pull`` of the server in this process."""
    return _served[0].pull()


@rpc.functions.async_execution
def serve_push(gradients: Sequence[Any]) -> Any:
    """Run ``push`` of the server in this process."""
    return _served[0].push(gradients)


def work(flags: Any) -> None:
    """Train, then let the first worker evaluate."""
    model, marks = torch_models.build(flags), task.Marks(flags.every, flags.steps)
    parameters = list(model.parameters())
    step, values = rpc.rpc_sync("ps0", serve_pull)
    batches = task.batches(flags)
    while step < flags.steps:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data, parameter.grad = value, None
        loss = model.loss(*(torch.from_numpy(np.asarray(array)) for array in next(batches)))
        loss.backward()
        step, values = rpc.rpc_sync("ps0", serve_push, args=([parameter.grad for parameter in parameters],))
        loss.item()
        marks.at(step)
    if flags.index == 0:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        task.say("done", **torch_models.evaluate(model, flags))


def options(flags: Any) -> Any:
    """Return the transport's options; PyTorch's own but for the rendezvous, unless TCP is asked for."""
    only = {"_transports": ["uv"], "_channels": ["basic"]} if flags.variant == "tcp" else {}
    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{flags.ports[0]}", rpc_timeout=120, **only)


def main() -> None:
    """Be one task."""
    flags = task.flags()
    rank = flags.index + (flags.num_ps if flags.role == "worker" else 0)
    if flags.role == "ps":
        if flags.model == "ctr":
            torch_ctr.start_server(flags)
        else:
            _served.append(Server(flags))
    size = flags.num_ps + flags.num_workers
    rpc.init_rpc(f"{flags.role}{flags.index}", rank=rank, world_size=size, rpc_backend_options=options(flags))
    if flags.role == "worker":
        torch_ctr.work(flags) if flags.model == "ctr" else work(flags)
    rpc.shutdown()


if __name__ == "__main__":
    main()
