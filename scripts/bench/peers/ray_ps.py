"""Ray's parameter-server example, sync and async, with PyTorch's model; one process starts all actors.

As the example does it: weights and gradients are dictionaries and lists of numpy arrays in Ray's object store.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import task
import torch
import torch_models

RATE = 0.05


def weights_of(model: Any) -> dict[str, Any]:
    """Return a model's parameters as arrays."""
    return {name: value.numpy() for name, value in model.state_dict().items()}


def set_weights(model: Any, weights: dict[str, Any]) -> None:
    """Give a model its parameters."""
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})


@ray.remote
class ParameterServer:
    """Holds the model and its optimizer."""

    def __init__(self, flags: Any) -> None:
        self._model = torch_models.build(flags)
        self._optimizer = torch.optim.Adagrad(self._model.parameters(), RATE, initial_accumulator_value=0.1)

    def apply_gradients(self, *gradients: Any) -> dict[str, Any]:
        """Apply the mean of some workers' gradients; returns the weights."""
        means = [np.stack(group).mean(axis=0) for group in zip(*gradients, strict=True)]
        for parameter, mean in zip(self._model.parameters(), means, strict=True):
            parameter.grad = torch.from_numpy(mean)
        self._optimizer.step()
        return self.get_weights()

    def get_weights(self) -> dict[str, Any]:
        """Return the weights."""
        return weights_of(self._model)


@ray.remote
class DataWorker:
    """Computes gradients on its share of the data."""

    def __init__(self, flags: Any, index: int) -> None:
        flags.index = index
        self._model, self._batches = torch_models.build(flags), task.batches(flags)

    def compute_gradients(self, weights: dict[str, Any]) -> list[Any]:
        """Return the gradients of the next batch."""
        set_weights(self._model, weights)
        self._model.zero_grad()
        self._model.loss(*(torch.from_numpy(array) for array in next(self._batches))).backward()
        return [parameter.grad.numpy() for parameter in self._model.parameters()]


def train_sync(flags: Any, server: Any, workers: list[Any], marks: task.Marks) -> Any:
    """Take steps of all workers; returns the last weights."""
    weights = server.get_weights.remote()
    for step in range(1, flags.steps + 1):
        weights = server.apply_gradients.remote(*[worker.compute_gradients.remote(weights) for worker in workers])
        if step % flags.every == 0 or step == flags.steps:
            ray.wait([weights])
            marks.at(step)
    return weights


def train_async(flags: Any, server: Any, workers: list[Any], marks: task.Marks) -> Any:
    """Apply gradients as they come; returns the last weights."""
    weights = server.get_weights.remote()
    computing = {worker.compute_gradients.remote(weights): worker for worker in workers}
    for step in range(1, flags.steps + 1):
        ready, _ = ray.wait(list(computing))
        worker = computing.pop(ready[0])
        weights = server.apply_gradients.remote(ready[0])
        computing[worker.compute_gradients.remote(weights)] = worker
        if step % flags.every == 0 or step == flags.steps:
            ray.wait([weights])
            marks.at(step)
    return weights


def main() -> None:
    """Run the job."""
    flags = task.flags()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = here  # the actors import this file's neighbors
    sys.path.insert(0, here)
    ray.init(include_dashboard=False, logging_level="error", _node_ip_address="127.0.0.1")
    server = ParameterServer.options(num_cpus=0).remote(flags)
    workers = [DataWorker.options(num_cpus=0).remote(flags, index) for index in range(flags.num_workers)]
    train = train_sync if flags.mode == "sync" else train_async
    weights = ray.get(train(flags, server, workers, task.Marks(flags.every, flags.steps)))
    model = torch_models.build(flags)
    set_weights(model, weights)
    task.say("done", **torch_models.evaluate(model, flags))
    ray.shutdown()


if __name__ == "__main__":
    main()
