"""Read MNIST's IDX files, and report every problem with them.

The format (http://yann.lecun.com/exdb/mnist/), all big-endian: two zero bytes, a type code (8 is unsigned byte), the
number of dimensions, each dimension as an unsigned 32-bit integer, then the values, last dimension fastest. Files are
often gzipped: their first bytes show that, not their name. A header is trusted only as far as the file goes.

Bad data must be reported before TensorFlow is imported, so this module must not import it.
"""

import gzip
import os
import stat
import struct
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tfps.errors import DataError
from tfps.text import show

Bytes: TypeAlias = npt.NDArray[np.uint8]

NUM_CLASSES = 10
IMAGE_SIZE = (28, 28)

_UNSIGNED_BYTE = 0x08
_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Images:
    """Labeled images in two parts.

    Attributes:
        train_images: uint8, shape [n, 28, 28], 0 is background and 255 is ink.
        train_labels: uint8, shape [n], 0 to 9.
        eval_images: As ``train_images``, never trained on.
        eval_labels: As ``train_labels``.
        is_split: Whether both parts are of one set.
    """

    train_images: Bytes
    train_labels: Bytes
    eval_images: Bytes
    eval_labels: Bytes
    is_split: bool = False


def check(data_dir: str, num_workers: int) -> None:
    """Read everything in ``--data_dir`` as training would, and discard it. Takes about a second for MNIST.

    Raises:
        DataError: As ``load``, or if there are fewer training images than workers.
    """
    count = len(load(data_dir).train_images)
    if count < num_workers:
        raise DataError(
            f"--data_dir={show(data_dir, 200)} has {count:,} training images for {num_workers:,} workers: each worker "
            f"needs one or more of its own; use at most {count:,} workers or add images."
        )


def load(data_dir: str) -> Images:
    """Read the images and labels of a directory.

    Files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same with ``t10k``. A dot may replace the
    dash before ``idx``, and ``.gz`` may follow. If a file is there in two forms, the unzipped one is used. ``train`` is
    for training and ``t10k`` for evaluation. If only one of the two is there, its last fifth is kept for evaluation.

    Raises:
        DataError: Lists every problem found, one per line.
    """
    problems: list[str] = []
    pairs = _read_pairs(data_dir, problems)
    if problems:
        raise DataError("\n".join(f"--data_dir={show(data_dir, 200)}{problem}" for problem in problems))
    return Images(*pairs[0], *pairs[1]) if len(pairs) == 2 else keep_last_fifth(*pairs[0])


def keep_last_fifth(images: Bytes, labels: Bytes) -> Images:
    """Split one set in order: its last fifth, at least one example, is for evaluation."""
    at = len(images) - max(1, len(images) // 5)
    return Images(images[:at], labels[:at], images[at:], labels[at:], is_split=True)


def _read_pairs(data_dir: str, problems: list[str]) -> list[tuple[Bytes, Bytes]]:
    """Return the images and labels of ``train``, then ``t10k``; adds ``problems`` that continue the flag's text."""
    try:
        names = sorted(os.listdir(data_dir))
    except (OSError, ValueError) as error:
        problems.append(_not_listed(error))
        return []
    pairs = [_pair(Path(data_dir), names, split, problems) for split in ("train", "t10k")]
    if pairs == [None, None] and not problems:
        problems.append(_nothing_found(names))
    return [pair for pair in pairs if pair is not None]


def _not_listed(error: OSError | ValueError) -> str:
    """Return the reason why a directory's files cannot be listed."""
    if isinstance(error, FileNotFoundError):
        return " does not exist: give the directory that holds the IDX files."
    if isinstance(error, NotADirectoryError):
        return " is a file: give the directory that holds the IDX files."
    return f" cannot be read: {_reason(error)}. Give a directory that this user can read."


def _pair(directory: Path, names: Collection[str], split: str, problems: list[str]) -> tuple[Bytes, Bytes] | None:
    """Return the images and labels of ``train`` or ``t10k``; ``None`` if they are absent or have ``problems``."""
    images_name, labels_name = _find(names, split, "images", 3), _find(names, split, "labels", 1)
    images = _read_named(directory, images_name, IMAGE_SIZE, problems)
    labels = _read_named(directory, labels_name, (), problems)
    if images_name is None or labels_name is None:
        if images_name or labels_name:
            problems.append(_half_missing(images_name or labels_name or "", split, images_name is None))
        return None
    if images is None or labels is None:
        return None
    found = _label_problems(images, labels, images_name, labels_name)
    problems += found
    return None if found else (images, labels)


def _find(names: Collection[str], split: str, kind: str, dimensions: int) -> str | None:
    """Return the name of the form of an MNIST file that is there, or ``None``."""
    forms = (f"{split}-{kind}{dot}idx{dimensions}-ubyte{end}" for end in ("", ".gz") for dot in "-.")
    return next((form for form in forms if form in names), None)


def _read_named(directory: Path, name: str | None, shape: tuple[int, ...], problems: list[str]) -> Bytes | None:
    """Read one file; if it is damaged, add its problem to ``problems``."""
    if name is None:
        return None
    try:
        return _read(directory / name, shape)
    except DataError as error:
        problems.append(f": {name} {error}")
    return None


def _read(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Read an IDX file of unsigned bytes with examples of ``shape``; an error's text continues the file's name."""
    try:
        with _open(path) as file:
            count = _header(file, shape)
            return _values(file, count * int(np.prod(shape))).reshape(count, *shape)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"is damaged: it is not one whole gzip file ({error}). Copy or download it again.") from None
    except OSError as error:
        raise DataError(f"cannot be read: {_reason(error)}. Make it a file that this user can read.") from None


def _open(path: Path) -> BinaryIO:
    """Open a file, gzipped or not."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError("is not a file: put the IDX file itself there.")
    with path.open("rb") as file:
        gzipped = file.read(2) == _GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path)) if gzipped else path.open("rb")


def _header(file: BinaryIO, shape: tuple[int, ...]) -> int:
    """Read a header; returns the number of examples."""
    size = 4 + 4 * (1 + len(shape))
    header = file.read(size)
    problem = _magic_problem(header[:4], 1 + len(shape))
    if problem:
        raise DataError(problem)
    if len(header) < size:
        raise DataError(f"is cut short: {len(header)} bytes, its header alone has {size}. Copy or download it again.")
    count, *found = struct.unpack(f">{1 + len(shape)}I", header[4:])
    if tuple(found) != shape:
        raise DataError(f"holds images of {_by(found)} pixels; they must be {_by(shape)}: resize them.")
    if not count:
        raise DataError(f"holds no {'images' if shape else 'labels'}; it must hold one or more: give another file.")
    return int(count)


def _magic_problem(magic: bytes, dimensions: int) -> str:
    """Return the problem with the first four bytes of a file, or an empty string."""
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if len(magic) < 4:
        return f"is cut short: {len(magic)} bytes, less than an IDX header. Copy or download it again."
    if magic[:2] != expected[:2]:
        return f"is not an IDX file: it starts with 0x{magic.hex()}, not 0x{expected.hex()}. Give MNIST's own file."
    if magic[2] != _UNSIGNED_BYTE:
        given = f"0x{magic[2]:02x} ({_TYPES.get(magic[2], 'unknown')})"
        return f"holds values of type {given}; they must be 0x08 (uint8): convert them to unsigned bytes."
    if magic[3] != dimensions:
        hint = "images have 3, labels 1: are the two files swapped?"
        return f"has {magic[3]} dimension{'s' * (magic[3] != 1)}; it must have {dimensions} ({hint})"
    return ""


def _values(file: BinaryIO, expected: int) -> Bytes:
    """Read the values after a header in pieces, because a wrong header must not cause a huge allocation."""
    values = bytearray()
    while len(values) <= expected and (piece := file.read(min(_CHUNK_BYTES, expected + 1 - len(values)))):
        values += piece
    header = f"its header promises {expected:,} bytes of values"
    if len(values) < expected:
        raise DataError(f"is cut short: {header}, there are {len(values):,}. Copy or download it again.")
    if len(values) > expected:
        raise DataError(f"is too long: {header}, and more follow. Copy or download it again.")
    return np.frombuffer(values, np.uint8)


def _label_problems(images: Bytes, labels: Bytes, images_name: str, labels_name: str) -> list[str]:
    """Return the problems with the labels of some images."""
    problems = []
    if len(images) != len(labels):
        problems.append(
            f": {len(images):,} images in {images_name} but {len(labels):,} labels in {labels_name}: "
            "there must be one label for each image; take both files from the same set."
        )
    if labels.max() >= NUM_CLASSES:
        at = int(np.argmax(labels >= NUM_CLASSES))
        problems.append(
            f": {labels_name} has the label {labels[at]} at position {at:,}; labels must be 0 to 9: "
            "correct it, or give another file."
        )
    return problems


def _half_missing(there: str, split: str, images_missing: bool) -> str:
    missing, name = ("images", "images-idx3-ubyte") if images_missing else ("labels", "labels-idx1-ubyte")
    return f" has {there} but not its {missing}: add {split}-{name} (or with .gz)."


def _nothing_found(names: Collection[str]) -> str:
    if not names:
        return " is empty: put the IDX files there (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz)."
    seen = ", ".join(show(name, 40) for name in list(names)[:3])
    return (
        f" holds no images: expected train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-... (or with .gz); "
        f"it has {seen}{', ...' if len(names) > 3 else ''}. Give the directory that holds the IDX files."
    )


def _by(sizes: Iterable[int]) -> str:
    return "x".join(str(size) for size in sizes)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
