"""Reading data: what is read, what is refused and how it is reported, and which worker gets what in which order."""

import contextlib
import gzip
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from sklearn import datasets
from support.processes import MNIST, REPO

from tfps import Examples
from tfps.data import digits, idx
from tfps.data.batches import batches
from tfps.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
EVAL_IMAGES, EVAL_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not beside the repository (shared/data/mnist)")


def encode(array: np.ndarray, magic: bytes | None = None) -> bytes:
    """Return an array of bytes as the contents of an IDX file."""
    start = bytes([0, 0, 8, array.ndim]) if magic is None else magic
    return start + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def some_images(count: int, size: int = 28) -> np.ndarray:
    """Return images of which each is filled with its own number."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, size, size))


def some_labels(count: int) -> np.ndarray:
    """Return the labels of those images: the last figure of the number."""
    return (np.arange(count) % 10).astype(np.uint8)


def write_pair(directory: Path, count: int = 20, images: str = IMAGES, labels: str = LABELS) -> Path:
    """Write good files of ``count`` examples; returns their directory."""
    for name, array in ((images, some_images(count)), (labels, some_labels(count))):
        contents = encode(array)
        (directory / name).write_bytes(gzip.compress(contents) if name.endswith(".gz") else contents)
    return directory


def refusal(data_dir: Path | str, num_workers: int = 1) -> str:
    """Return what ``check`` says of a directory that it refuses."""
    with pytest.raises(DataError) as caught:
        idx.check(str(data_dir), num_workers)
    text = str(caught.value)
    assert all(line.startswith("--data_dir=") for line in text.splitlines())
    return text


@pytest.fixture(scope="module", autouse=True)
def _tf1() -> None:
    tf.disable_v2_behavior()
    tf.enable_resource_variables()


# What is read


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dot", "-.")
def test_names_in_the_wild(tmp_path: Path, dot: str, end: str) -> None:
    """Files are found with a dash or a dot before ``idx``, gzipped or not."""
    write_pair(tmp_path, 20, f"train-images{dot}idx3-ubyte{end}", f"train-labels{dot}idx1-ubyte{end}")
    write_pair(tmp_path, 10, f"t10k-images{dot}idx3-ubyte{end}", f"t10k-labels{dot}idx1-ubyte{end}")
    data = idx.load(str(tmp_path))
    np.testing.assert_array_equal(data.train_images, some_images(20))
    np.testing.assert_array_equal(data.train_labels, some_labels(20))
    np.testing.assert_array_equal(data.eval_images, some_images(10))
    np.testing.assert_array_equal(data.eval_labels, some_labels(10))


def test_gzip_is_told_by_contents(tmp_path: Path) -> None:
    """A gzipped file without ``.gz`` and a plain one with it are both read."""
    (tmp_path / IMAGES).write_bytes(gzip.compress(encode(some_images(10))))
    (tmp_path / f"{LABELS}.gz").write_bytes(encode(some_labels(10)))
    assert len(idx.load(str(tmp_path)).train_images) == 8


@pytest.mark.parametrize(("images", "labels"), [(IMAGES, LABELS), (EVAL_IMAGES, EVAL_LABELS)])
def test_one_pair_alone_is_split(tmp_path: Path, images: str, labels: str) -> None:
    """Of one pair alone, the last fifth is for evaluation and never trained on."""
    data = idx.load(str(write_pair(tmp_path, 52, images, labels)))
    np.testing.assert_array_equal(data.train_images, some_images(52)[:42])
    np.testing.assert_array_equal(data.eval_images, some_images(52)[42:])
    np.testing.assert_array_equal(np.concatenate([data.train_labels, data.eval_labels]), some_labels(52))


@needs_mnist
def test_mnist_itself() -> None:
    """MNIST's own test files give 8,000 images to train on and 2,000 to evaluate, 980 zeros among all."""
    data = idx.load(str(MNIST))
    assert data.train_images.shape == (8000, 28, 28)
    assert data.eval_images.shape == (2000, 28, 28)
    assert np.bincount(np.concatenate([data.train_labels, data.eval_labels]))[0] == 980
    idx.check(str(MNIST), 8000)


def test_reading_does_not_import_tensorflow(tmp_path: Path) -> None:
    """Data is checked without TensorFlow, whose import takes longer than an answer may."""
    check = f"from tfps.data import digits, idx; digits.load(); idx.check({str(write_pair(tmp_path))!r}, 1)"
    code = f"{check}; import sys; print('tensorflow' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPO)
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr


# What is refused

Break = Callable[[Path], Any]


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Break:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


BAD = {
    "no labels": (lambda d: (d / LABELS).unlink(), [f"has {IMAGES} but not its labels", f"add {LABELS}"]),
    "no images for labels": (lambda d: (d / IMAGES).unlink(), [f"has {LABELS} but not its images", f"add {IMAGES}"]),
    "empty file": (_rewrite(IMAGES, lambda _: b""), [IMAGES, "is cut short: 0 bytes", "download it again"]),
    "cut header": (_rewrite(IMAGES, lambda b: b[:9]), [IMAGES, "is cut short: 9 bytes", "16"]),
    "cut values": (_rewrite(IMAGES, lambda b: b[:-5]), [IMAGES, "promises 15,680 bytes", "there are 15,675"]),
    "trailing bytes": (_rewrite(LABELS, lambda b: b + b"x"), [LABELS, "is too long", "promises 20 bytes"]),
    "wrong magic": (
        _rewrite(IMAGES, lambda b: b"PNG!" + b[4:]),
        [IMAGES, "not an IDX file", "0x504e4721", "0x00000803"],
    ),
    "wrong dtype": (_rewrite(IMAGES, lambda b: b"\0\0\x0d\3" + b[4:]), [IMAGES, "0x0d (float32)", "0x08 (uint8)"]),
    "unknown dtype": (_rewrite(LABELS, lambda b: b"\0\0\x77\1" + b[4:]), [LABELS, "0x77 (unknown)", "0x08 (uint8)"]),
    "swapped": (
        lambda d: write_pair(d, 20, images=LABELS, labels=IMAGES),
        [f"{IMAGES} has 1 dimension;", f"{LABELS} has 3 dimensions;", "are the two files swapped?"],
    ),
    "wrong size": (_rewrite(IMAGES, lambda _: encode(some_images(20, 32))), [IMAGES, "32x32", "28x28", "resize"]),
    "fewer labels": (_rewrite(LABELS, lambda _: encode(some_labels(19))), ["20 images", "19 labels", IMAGES, LABELS]),
    "bad label": (_rewrite(LABELS, lambda b: b[:-1] + b"\x0a"), [LABELS, "the label 10 at position 19", "0 to 9"]),
    "no examples": (_rewrite(IMAGES, lambda _: encode(some_images(0))), [IMAGES, "holds no images", "one or more"]),
    "cut gzip": (_rewrite(IMAGES, lambda b: gzip.compress(b)[:-9]), [IMAGES, "not one whole gzip file", "again"]),
    "gzip and rubbish": (
        _rewrite(IMAGES, lambda b: gzip.compress(b) + b"rubbish"),
        [IMAGES, "not one whole gzip file"],
    ),
    "cut inside gzip": (_rewrite(IMAGES, lambda b: gzip.compress(b[:-5])), [IMAGES, "there are 15,675"]),
    "a directory": (lambda d: ((d / IMAGES).unlink(), (d / IMAGES).mkdir()), [IMAGES, "is not a file"]),
    "a pipe": (lambda d: ((d / IMAGES).unlink(), os.mkfifo(d / IMAGES)), [IMAGES, "is not a file"]),
    "a dangling link": (
        lambda d: ((d / IMAGES).unlink(), (d / IMAGES).symlink_to(d / "gone")),
        [IMAGES, "cannot be read: No such file"],
    ),
}


@pytest.mark.parametrize(("damage", "reported"), BAD.values(), ids=BAD)
def test_damaged_files(tmp_path: Path, damage: Break, reported: list[str]) -> None:
    """A damaged file is answered with the flag, the file, what is there, and what should be."""
    damage(write_pair(tmp_path))
    text = refusal(tmp_path)
    assert str(tmp_path) in text
    assert all(part in text for part in reported), text


@pytest.mark.parametrize("at", [12, 40, -6, -2])
def test_corrupt_gzip(tmp_path: Path, at: int) -> None:
    """A damaged byte in a gzip file is found, wherever it is: in the data, the checksum or the length."""
    write_pair(tmp_path, images=f"{IMAGES}.gz")
    contents = bytearray((tmp_path / f"{IMAGES}.gz").read_bytes())
    contents[at] ^= 0xFF
    (tmp_path / f"{IMAGES}.gz").write_bytes(contents)
    assert f"{IMAGES}.gz " in refusal(tmp_path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_header_that_lies_costs_no_memory(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """A header that promises 3.4 TB in a small file is answered within a few MB."""
    write_pair(tmp_path)
    lie = b"\0\0\x08\3" + struct.pack(">3I", 2**32 - 1, 28, 28) + bytes(1000)
    (tmp_path / IMAGES).write_bytes(compress(lie))
    tracemalloc.start()
    text = refusal(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
    assert "promises 3,367,254,359,280 bytes of values, there are 1,000" in text


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Every problem of all four files is reported, a line each."""
    write_pair(tmp_path)
    write_pair(tmp_path, images=EVAL_IMAGES, labels=EVAL_LABELS)
    _rewrite(IMAGES, lambda b: b[:-1])(tmp_path)
    _rewrite(LABELS, lambda b: b + b"x")(tmp_path)
    _rewrite(EVAL_LABELS, lambda _: encode(np.full(19, 11)))(tmp_path)
    lines = refusal(tmp_path).splitlines()
    assert len(lines) == 4
    assert all(name in line for name, line in zip([IMAGES, LABELS, EVAL_LABELS, EVAL_LABELS], lines, strict=True))


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda _: None, "does not exist: give the directory"),
        (lambda d: d.mkdir(), "is empty: put the IDX files there"),
        (lambda d: d.write_bytes(b"x"), "is a file: give the directory"),
        (lambda d: (d.mkdir(), (d / "notes.txt").touch()), "holds no images: expected train-images-idx3-ubyte"),
    ],
    ids=["missing", "empty", "a file", "other files"],
)
def test_bad_directories(tmp_path: Path, make: Break, reported: str) -> None:
    """A directory that is missing, empty, a file, or of something else is answered with the fix."""
    make(tmp_path / "data")
    assert refusal(tmp_path / "data").startswith(f"--data_dir={tmp_path / 'data'} {reported}")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "line\nbreak"], ids=["NUL", "long", "newline"])
def test_odd_directory_names(name: str) -> None:
    """A name that no file can have is answered like any other, on one short line."""
    text = refusal(name)
    assert len(text.splitlines()) == 1
    assert len(text) < 500


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Be nobody for a while: root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", [IMAGES, "."], ids=["file", "directory"])
def test_unreadable(name: str) -> None:
    """A file or directory that this user may not read is answered, not crashed on."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        write_pair(Path(directory))
        (Path(directory) / name).chmod(0)
        with unprivileged():
            text = refusal(directory)
        Path(directory).chmod(0o755)
    assert "cannot be read: Permission denied" in text


def test_fewer_images_than_workers(tmp_path: Path) -> None:
    """More workers than training images are refused; just as many are not."""
    write_pair(tmp_path, 20)
    idx.check(str(tmp_path), 16)
    assert "has 16 training images for 17 workers" in refusal(tmp_path, 17)


# The digits that the package carries


def test_digits_are_whole() -> None:
    """The carried file holds the 1,797 images of the original, in its order, to the bit."""
    path = Path(digits.__file__).with_name("digits.npz")
    assert path.stat().st_size < 50_000
    with np.load(path) as stored:
        images, labels = stored["images"], stored["labels"]
    assert (images.shape, images.dtype, images.max()) == ((1797, 8, 8), np.uint8, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == (
        "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    )
    assert "CC BY 4.0" in path.with_suffix(".LICENSE").read_text()


def test_digits_are_the_original() -> None:
    """The carried digits are scikit-learn's copy of the UCI set."""
    original = datasets.load_digits()
    with np.load(Path(digits.__file__).with_name("digits.npz")) as stored:
        np.testing.assert_array_equal(stored["images"], original.images)
        np.testing.assert_array_equal(stored["labels"], original.target)


def test_digits_look_like_mnist() -> None:
    """They are loaded at MNIST's size and range, a pixel as 3x3, the last fifth for evaluation."""
    data = digits.load()
    assert data.train_images.shape == (1438, 28, 28)
    assert data.eval_images.shape == (359, 28, 28)
    assert (data.train_images.dtype, data.train_images.min(), data.train_images.max()) == (np.uint8, 0, 255)
    assert data.train_labels[:30].tolist() == list(range(10)) * 3
    one = digits.enlarge(np.pad(np.full((1, 1, 1), 8, np.uint8), ((0, 0), (0, 7), (0, 7))))
    assert set(zip(*np.nonzero(one[0]), strict=True)) == {(row, column) for row in (2, 3, 4) for column in (2, 3, 4)}
    assert one.max() == 128


# Batches


def read(count: int, num_batches: int, **options: Any) -> list[list[int]]:
    """Return the batches of a dataset over ``count`` numbered images, as the numbers."""
    found = []
    with tf.Graph().as_default(), tf.Session() as session:
        iterator = tf.data.make_initializable_iterator(batches(some_images(count), some_labels(count), **options))
        following = iterator.get_next()
        session.run(iterator.initializer)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            for _ in range(num_batches):
                features, labels = session.run(following)
                numbers = np.rint(features["image"][:, 14, 14, 0] * 255).astype(int)
                np.testing.assert_array_equal(numbers % 10, labels)
                found.append(numbers.tolist())
    return found


def flat(found: list[list[int]]) -> list[int]:
    """Return batches as one list."""
    return [number for batch in found for number in batch]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_disjoint_and_complete(count: int) -> None:
    """In an epoch the workers together see every example once; worker i of n sees those that are i modulo n."""
    shares = []
    for index in range(count):
        size = len(range(index, 50, count))
        shares.append(sorted(flat(read(50, 1, batch_size=size, seed=1, shard=(index, count)))))
        assert shares[index] == list(range(index, 50, count))
    assert sorted(flat(shares)) == list(range(50))


def test_every_example_once_an_epoch() -> None:
    """Each of 10 examples comes once an epoch, though a batch of 4 may span two, and each epoch has its own order."""
    found = flat(read(10, 10, batch_size=4, seed=1))
    epochs = [found[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batch_larger_than_the_share() -> None:
    """A batch of 64 from a share of 10 is full: six epochs and a part of the next."""
    (batch,) = read(20, 1, batch_size=64, seed=1, shard=(1, 2))
    assert sorted(batch[:60]) == sorted(list(range(1, 20, 2)) * 6)
    assert len(set(batch[60:])) == 4


def test_order_is_the_seeds() -> None:
    """The same seed gives the same order; another seed, or another worker, another."""
    first = flat(read(40, 5, batch_size=8, seed=1, shard=(0, 2)))
    assert flat(read(40, 5, batch_size=8, seed=1, shard=(0, 2))) == first
    assert flat(read(40, 5, batch_size=8, seed=2, shard=(0, 2))) != first
    assert [number - 1 for number in flat(read(40, 5, batch_size=8, seed=1, shard=(1, 2)))] != first


def test_evaluation_is_one_pass_in_order() -> None:
    """Evaluation sees everything once, in order, the last batch smaller."""
    assert read(10, 99, batch_size=4, training=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_are_typed_and_scaled() -> None:
    """A batch is float32 images of 0 to 1 with a channel, and int32 labels; its size is known to the graph."""
    with tf.Graph().as_default(), tf.Session() as session:
        images = np.array([0, 51, 255], np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
        dataset = batches(images, some_labels(3), batch_size=3, training=False)
        assert tf.data.get_output_types(dataset) == ({"image": tf.float32}, tf.int32)
        assert tf.data.get_output_shapes(batches(images, some_labels(3), 2))[0]["image"].as_list() == [2, 28, 28, 1]
        iterator = tf.data.make_initializable_iterator(dataset)
        session.run(iterator.initializer)
        features, _ = session.run(iterator.get_next())
    np.testing.assert_allclose(features["image"][:, 0, 0, 0], [0, 0.2, 1], rtol=1e-6)


def test_graph_does_not_hold_the_data() -> None:
    """The graph stays small whatever the data: it is written into checkpoints and sent about."""
    with tf.Graph().as_default() as graph:
        batches(np.zeros((5000, 28, 28), np.uint8), np.zeros(5000, np.uint8), 128)
        assert graph.as_graph_def().ByteSize() < 20_000


def test_empty_share_is_refused() -> None:
    """A worker with nothing to train on says so instead of waiting for ever."""
    with tf.Graph().as_default(), pytest.raises(DataError, match="worker 3 of 4 has no example among 3"):
        batches(some_images(3), some_labels(3), 2, shard=(3, 4))


@pytest.mark.parametrize(("size", "read", "error"), [("3", abs, TypeError), (0, abs, ValueError), (3, None, TypeError)])
def test_examples_that_cannot_be_read_are_refused(size: Any, read: Any, error: type[Exception]) -> None:
    """Where the model makes them, so that the message has its line."""
    with pytest.raises(error, match="Examples"):
        Examples(size, read)
