"""The workloads' dense models for PyTorch, the same as tfps's. Each has ``loss(x, y)``."""

from typing import Any

import numpy as np
import task
import torch
from torch import nn
from torch.nn import functional

EDGES = (
    ((1, 0, -1), (1, 0, -1), (1, 0, -1)),
    ((1, 1, 1), (0, 0, 0), (-1, -1, -1)),
    ((-1, -1, 0), (-1, 0, 1), (0, 1, 1)),
)


class ConvNet(nn.Module):
    """MNIST's: 3 filters of 3x3, max-pooling, ReLU, one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dense = nn.Conv2d(1, 3, 3), nn.Linear(192, 10)
        self.conv.weight.data = torch.tensor(EDGES, dtype=torch.float32).unsqueeze(1)
        for zeros in (self.conv.bias, self.dense.weight, self.dense.bias):
            nn.init.zeros_(zeros)

    def forward(self, x: Any) -> Any:
        """Return logits of images of shape [batch, 28, 28, 1]."""
        net = functional.relu(functional.max_pool2d(self.conv(x.view(-1, 1, 28, 28)), 3))
        return self.dense(net.flatten(1))

    def loss(self, x: Any, y: Any) -> Any:
        """Return the mean cross entropy."""
        return functional.cross_entropy(self(x), y.long())

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Return the accuracy."""
        return {"accuracy": (self(x).argmax(dim=1) == y).float().mean().item()}


class Narrow(nn.Module):
    """50 residual layers of 16x16."""

    def __init__(self, init: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in init)
        for layer, first in zip(self.layers, init, strict=True):
            layer.weight.data = torch.from_numpy(first.T.copy())
            nn.init.zeros_(layer.bias)

    def loss(self, x: Any, y: Any) -> Any:
        """Return the mean squared error."""
        net = x
        for layer in self.layers:
            net = net + 0.1 * torch.tanh(layer(net))
        return functional.mse_loss(net, y)

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Return the loss."""
        return {"loss": self.loss(x, y).item()}


class Dense(nn.Module):
    """16 vectors of ``megabytes`` together, whose gradient is the input."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        size = megabytes * 10**6 // 4 // task.DENSE_VARIABLES
        self.parts = nn.ParameterList(torch.zeros(size) for _ in range(task.DENSE_VARIABLES))

    def loss(self, x: Any, y: Any) -> Any:
        """Return the sum times the input."""
        del y
        return sum((part * x).sum() for part in self.parts)

    def measure(self) -> dict[str, float]:
        """Return the least and the greatest value."""
        low, high = (min(p.min().item() for p in self.parts), max(p.max().item() for p in self.parts))
        return {"low": low, "high": high}


def build(flags: Any) -> Any:
    """Return the model of a workload."""
    makers = {
        "mnist": ConvNet,
        "narrow": lambda: Narrow(task.load(flags, "init")),
        "dense": lambda: Dense(flags.mb),
    }
    return makers[flags.model]()


def evaluate(model: Any, flags: Any) -> dict[str, float]:
    """Return what the model is worth."""
    names = [] if flags.model == "dense" else ["eval_x", "eval_y"]
    with torch.no_grad():
        return model.measure(*(torch.from_numpy(np.asarray(task.load(flags, name))) for name in names))
