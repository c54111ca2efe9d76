"""Make the data of the workloads: MNIST's images from their IDX files, and made-up rows for the rest.

Each model's data are ``train_x``, ``train_y``, ``eval_x``, ``eval_y`` (and ``init``, first values) as .npy files in one
directory, which every program reads; tfps reads MNIST from the IDX files themselves.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]

WIDTH, LAYERS = 16, 50
FIELDS, ROWS = 26, 40_000
POPULAR = 50  # ids of each field that clicks depend on: seen often enough to be learned in a few hundred steps


def write(model: str, mnist_dir: Path, to: Path) -> Path:
    """Write a model's arrays below ``to`` and return their directory."""
    directory = to / model
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {"mnist": lambda: _mnist(mnist_dir), "narrow": _narrow, "ctr": _ctr, "dense": dict, "null": dict}[model]()
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    return directory


def _mnist(directory: Path) -> Arrays:
    """Return t10k's first 8,000 images to train on and its last 2,000 to evaluate; pixels 0 to 1."""
    pixels = np.frombuffer(gzip.decompress((directory / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((directory / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    images = pixels.reshape(-1, 28, 28, 1).astype(np.float32) / 255
    return _split(images, labels.astype(np.int32), len(images) // 5)


def _narrow() -> Arrays:
    """Return rows of 16 numbers, and a smooth function of them."""
    random = np.random.default_rng(1)
    x = random.standard_normal((40_000, WIDTH), np.float32)
    y = x + 2 * np.tanh(x @ random.standard_normal((WIDTH, WIDTH), np.float32) / 2)
    init = random.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / 4
    return {**_split(x, y, 2_000), "init": init}


def _ctr() -> Arrays:
    """Return 26 ids a row, drawn by Zipf's law, and clicks that a hidden logistic model drew from them."""
    random = np.random.default_rng(2)
    popularity = np.cumsum(1 / np.arange(1, ROWS + 1) ** 1.05)
    draws = random.random((164_096, FIELDS)) * popularity[-1]
    ids = np.minimum(np.searchsorted(popularity, draws), ROWS - 1).astype(np.int32)
    weights = np.where(np.arange(ROWS) < POPULAR, random.normal(0, 2, (FIELDS, ROWS)), 0)
    logits = weights[np.arange(FIELDS), ids].sum(axis=1)
    clicks = random.random(len(ids)) < 1 / (1 + np.exp(-logits))
    return _split(ids, clicks.astype(np.float32), 4_096)


def _split(x: Any, y: Any, evaluated: int) -> Arrays:
    """Keep the last ``evaluated`` rows for evaluation."""
    return {"train_x": x[:-evaluated], "train_y": y[:-evaluated], "eval_x": x[-evaluated:], "eval_y": y[-evaluated:]}
