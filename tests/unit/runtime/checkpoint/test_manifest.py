"""Whether a checkpoint is whole, told without TensorFlow: by its manifest, or by its own index."""

import json
import os
import random
import stat
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from support.checkpoints import unreadable
from support.cluster import tf
from support.processes import environment

from tfps.errors import CheckpointError
from tfps.runtime.checkpoint.manifest import index_hash, partial_updates, problem, seal
from tfps.runtime.checkpoint.publish import mend_state
from tfps.runtime.checkpoint.tensor_bundle import data_sizes
from tfps.storage import read_json


def save(directory: Path, sharded: bool = False) -> Path:
    """Save a checkpoint with plain TensorFlow: variables of several types, whole and in slices; returns its path."""
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        for index in range(3):
            with tf.device(f"cpu:{index % 2}"):
                tf.get_variable(f"layer_{index}/kernel", [index + 1, 5])
        with tf.device("cpu:1"):
            tf.get_variable("step", [], tf.int64, initializer=tf.zeros_initializer())
            tf.get_variable("split", [9, 2], partitioner=tf.fixed_size_partitioner(3))
            tf.get_variable("name", initializer=tf.constant(["a", "bc"]))
        session.run(tf.global_variables_initializer())
        saver = tf.train.Saver(sharded=sharded)
        return Path(saver.save(session, str(directory / "model.ckpt"), 7, write_meta_graph=False))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint without a manifest."""
    return save(tmp_path)


def files_of(path: Path) -> list[Path]:
    """Return a checkpoint's files."""
    return sorted(path.parent.glob(f"{path.name}.*"))


def flip(file: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def put(file: Path, how: str) -> None:
    """Put something that is no regular file in a file's place."""
    file.unlink(missing_ok=True)
    if how == "fifo":
        os.mkfifo(file)
    elif how == "directory":
        file.mkdir()
    else:
        os.mknod(file, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("how", ["fifo", "directory", "socket"])
@pytest.mark.parametrize("suffix", ["manifest.json", "index"])
def test_what_is_no_regular_file_is_damage(path: Path, suffix: str, how: str) -> None:
    """A FIFO, which nobody writes to, in place of a manifest or an index is not waited for: it is named."""
    put(Path(f"{path}.{suffix}"), how)
    assert problem(str(path)) == f"{path.name}.{suffix} cannot be read: it is not a regular file"
    assert partial_updates(str(path)) == 0


@pytest.mark.parametrize("how", ["fifo", "directory", "socket"])
def test_a_job_s_file_that_is_no_regular_file_is_an_error(tmp_path: Path, how: str) -> None:
    """So are ``job.json`` and ``summary.json``; a FIFO in place of the state file is replaced."""
    put(tmp_path / "summary.json", how)
    with pytest.raises(CheckpointError, match=r"summary.json cannot be read: it is not a regular file\. Move it away"):
        read_json(tmp_path / "summary.json")
    if how != "directory":
        put(tmp_path / "checkpoint", how)
        mend_state([str(tmp_path / "model.ckpt-7")])
        assert "model.ckpt-7" in (tmp_path / "checkpoint").read_text()


def test_a_manifest_tells_sizes_and_checksums(path: Path) -> None:
    """The manifest has each file's size and CRC-32, by what follows the checkpoint's name; so told, it is whole."""
    seal(path)
    reported = json.loads(Path(f"{path}.manifest.json").read_text())["files"]
    assert set(reported) == {"index", "data-00000-of-00001"}
    for suffix, file in reported.items():
        data = Path(f"{path}.{suffix}").read_bytes()
        assert file == {"bytes": len(data), "crc32": zlib.crc32(data)}
    assert problem(str(path)) is None


@pytest.mark.parametrize("how", ["not listed", "too short", "no index"])
def test_what_lacks_a_shard_gets_no_manifest(tmp_path: Path, how: str) -> None:
    """A network file system may list a file late: what is sealed is all that the index needs, or nothing."""
    path = save(tmp_path, sharded=True)
    shard, index, really = Path(f"{path}.data-00001-of-00002"), Path(f"{path}.index"), Path.iterdir
    listed = [file for file in really(tmp_path) if file != shard or how != "not listed"]
    if how == "too short":
        os.truncate(shard, shard.stat().st_size - 1)
    elif how == "no index":
        index.unlink()
        listed.remove(index)
    with mock.patch.object(Path, "iterdir", return_value=listed), pytest.raises(OSError) as refused:  # noqa: PT011
        seal(path)
    assert refused.value.filename == str(index if how == "no index" else shard)
    assert not Path(f"{path}.manifest.json").exists()
    index.write_bytes(b"garbled")
    with pytest.raises(ValueError, match="it does not end like an index"):
        seal(path)


def test_all_of_a_long_file_counts(path: Path) -> None:
    """A file of several blocks and a byte is read to its end: a changed bit in any block is found."""
    file = Path(f"{path}.data-00000-of-00001")
    file.write_bytes(random.Random(1).randbytes(3 * 2**20 + 1))
    seal(path)
    assert problem(str(path)) is None
    for at in (0, 2**20, 3 * 2**20 - 1, 3 * 2**20):
        flip(file, at)
        assert problem(str(path)) == f"{file.name} is not what was written: its checksum differs"
        flip(file, at)
    assert problem(str(path)) is None


@pytest.mark.parametrize("suffix", ["index", "data-00000-of-00001"])
def test_damage_is_found_by_the_manifest(path: Path, suffix: str) -> None:
    """A file that is cut off, longer, empty, changed or missing is named, with what is wrong."""
    seal(path)
    file, name = Path(f"{path}.{suffix}"), f"{path.name}.{suffix}"
    data = file.read_bytes()
    for wrong in (data[:-1], data + b"x", b""):
        file.write_bytes(wrong)
        assert problem(str(path)) == f"{name} has {len(wrong)} bytes instead of {len(data)}"
    file.write_bytes(data)
    for at in range(0, len(data), 7):
        flip(file, at)
        assert problem(str(path)) == f"{name} is not what was written: its checksum differs"
        file.write_bytes(data)
    file.unlink()
    assert problem(str(path)) == f"{name} is missing"


def test_a_damaged_manifest_is_found(path: Path) -> None:
    """Any one changed bit of a manifest, an empty one, and one that is JSON of another kind, are damage."""
    seal(path)
    manifest = Path(f"{path}.manifest.json")
    whole = manifest.read_bytes()
    for at in range(len(whole)):
        flip(manifest, at)
        assert problem(str(path)) is not None, whole[max(0, at - 10) : at + 10]
        manifest.write_bytes(whole)
    others = (b"[]", b'{"files": []}', b'{"files": {}}', b'{"files": {"index": 3}}', b'{"partial_updates": []}')
    for garbled in (b"\x00\xff", whole[:-5], b"[" * 100_000, *others):
        manifest.write_bytes(garbled)
        assert problem(str(path)) == f"{manifest.name} is garbled"
        assert partial_updates(str(path)) == 0
    manifest.write_bytes(b"")
    assert problem(str(path)) == f"{manifest.name} is empty"


def test_what_cannot_be_read_for_a_moment_is_whole(path: Path) -> None:
    """An error of a network file system that passes is no damage; one that stays is named."""
    seal(path)
    manifest = Path(f"{path}.manifest.json")
    whole = index_hash(str(path))
    with unreadable(manifest, times=3):
        assert problem(str(path)) is None
    with unreadable(manifest):
        assert problem(str(path)) == f"{manifest.name} cannot be read: Input/output error"
    with unreadable(Path(f"{path}.index"), times=3):
        assert index_hash(str(path)) == whole
    seal(path, partial_updates=7)
    with unreadable(manifest, times=3):
        assert partial_updates(str(path)) == 7


def test_data_that_is_restored_anyway_is_not_read_twice(path: Path) -> None:
    """Without ``read_data``, a changed bit in the data is not looked for; a changed length and a changed index are."""
    seal(path)
    data, index = Path(f"{path}.data-00000-of-00001"), Path(f"{path}.index")
    flip(data, 3)
    assert problem(str(path), read_data=False) is None
    assert problem(str(path)) is not None
    flip(index, 3)
    assert str(problem(str(path), read_data=False)).startswith(index.name)
    flip(index, 3)
    os.truncate(data, 3)
    assert str(problem(str(path), read_data=False)).startswith(data.name)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_index_tells_how_long_the_data_is(tmp_path: Path, sharded: bool) -> None:
    """What TensorFlow has written, in one shard or two, is whole, and as long as its index says."""
    path = save(tmp_path, sharded)
    assert problem(str(path)) is None
    data = [file for file in files_of(path) if ".data-" in file.name]
    assert len(data) == 1 + sharded
    assert data_sizes(Path(f"{path}.index").read_bytes()) == [file.stat().st_size for file in data]


def test_a_long_index_is_read_to_its_end(tmp_path: Path) -> None:
    """An index of many blocks, as that of a model with thousands of variables, tells the length of the data, too."""
    path, names = tmp_path / "model.ckpt-7", [f"{index}{'x' * 5000}" for index in range(300)]
    with tf.Graph().as_default(), tf.Session() as session:
        values = [tf.zeros([index]) for index in range(300)]
        write = tf.raw_ops.SaveV2(prefix=str(path), tensor_names=names, shape_and_slices=[""] * 300, tensors=values)
        session.run(write)
    index = Path(f"{path}.index")
    assert index.stat().st_size > 5 * 262144
    assert data_sizes(index.read_bytes()) == [4 * sum(range(300))]
    flip(index, index.stat().st_size // 2)
    assert problem(str(path)) == f"{index.name} is garbled: a checksum in it does not match"


@pytest.mark.parametrize("shard", [0, 1])
def test_damage_is_found_without_a_manifest(tmp_path: Path, shard: int) -> None:
    """Of a checkpoint of plain TensorFlow, a shard that is missing or too short is named, and so is a bad index."""
    path = save(tmp_path, sharded=True)
    file, index = Path(f"{path}.data-0000{shard}-of-00002"), Path(f"{path}.index")
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert problem(str(path)) == f"{file.name} has {size - 1} bytes instead of {size}"
    file.unlink()
    assert problem(str(path)) == f"{file.name} is missing"
    flip(index, 5)
    assert problem(str(path)) == f"{index.name} is garbled: a checksum in it does not match"
    index.write_bytes(b"")
    assert problem(str(path)) == f"{index.name} is garbled: it does not end like an index"
    index.unlink()
    assert problem(str(path)) == f"{index.name} is missing"


def _sizes(index: bytes) -> Sequence[int] | None:
    try:
        return data_sizes(index)
    except ValueError:
        return None


def test_a_garbled_index_is_reported_and_nothing_else(path: Path) -> None:
    """However an index is cut off, or a bit of it changed, that is reported; but for what is not used."""
    index = Path(f"{path}.index").read_bytes()
    whole, unused = data_sizes(index), len(index) - 100  # from there on are the footer, and a block that is empty
    assert [length for length in range(len(index)) if _sizes(index[:length]) is not None] == []
    for at in range(len(index) * 8):
        data = bytearray(index)
        data[at // 8] ^= 1 << at % 8
        assert _sizes(bytes(data)) is None or (at // 8 >= unused and _sizes(bytes(data)) == whole)
    noise = random.Random(2)
    for _ in range(1000):
        assert _sizes(noise.randbytes(200) + index[-48:]) is None


def test_a_checkpoint_is_judged_without_tensorflow() -> None:
    """What judges checkpoints does not import TensorFlow, so that the command line can answer in no time."""
    modules = "directory, finder, job_end, manifest, ownership, publish"
    code = f"import sys; from tfps.runtime.checkpoint import {modules}; print('tensorflow' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
