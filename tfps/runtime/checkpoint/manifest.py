"""The manifest of a checkpoint, ``model.ckpt-STEP.manifest.json``: its files' sizes and checksums when written.

The key of a file is the part of its name after ``model.ckpt-STEP.``. The manifest also holds how many updates are in
some variables and not in others. The checksum is CRC-32, which is fast; it protects against damage, not attackers. A
checkpoint without a manifest, written by plain TensorFlow, is compared with its own index. Does not import TensorFlow.
"""

import errno
import hashlib
import io
import json
import os
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tfps.runtime.checkpoint.tensor_bundle import data_sizes
from tfps.storage import open_file, patiently, read_file

MANIFEST, INDEX = "manifest.json", "index"
_BLOCK_BYTES = 1 << 20


class _File(NamedTuple):
    """A file's size in bytes, and its CRC-32."""

    bytes: int
    crc32: int


def seal(path: Path, partial_updates: int = 0) -> None:
    """Flush the files of a checkpoint to the disk, and write its manifest.

    Args:
        path: The checkpoint, without a suffix.
        partial_updates: How many updates are in some of its variables and not in others.

    Raises:
        OSError: If a file cannot be read, or a data file that the index needs is not listed, or is too short.
        ValueError: If the index is garbled.
    """
    files = [file for file in path.parent.iterdir() if file.name.startswith(f"{path.name}.")]
    written = {file.name.removeprefix(f"{path.name}."): _flushed(file) for file in sorted(files)}
    for suffix, least in _needed(file_of(path, INDEX)).items():
        if suffix not in written or written[suffix].bytes < least:
            raise OSError(errno.EIO, "the data is not all there", f"{path}.{suffix}")
    entries = {suffix: file._asdict() for suffix, file in written.items()}
    manifest = {"files": entries, "partial_updates": partial_updates}
    text = json.dumps(manifest | {"crc32": _crc32_of(manifest)}, indent=2)
    write_flushed(file_of(path, MANIFEST), f"{text}\n")


def _crc32_of(manifest: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def file_of(path: str | Path, suffix: str) -> Path:
    """Return the path of one of a checkpoint's files."""
    return Path(f"{path}.{suffix}")


def index_hash(path: str) -> str:
    """Return a hash of a checkpoint's index, which holds the checksum of each tensor; empty if it cannot be read."""
    try:
        return hashlib.sha256(patiently(lambda: read_file(file_of(path, INDEX)))).hexdigest()
    except OSError:
        return ""


def listed(manifest: Path) -> Collection[str]:
    """Return the part after ``model.ckpt-STEP.`` of each file name in a manifest.

    Raises:
        ValueError: If the manifest is damaged.
        OSError: If the manifest cannot be read.
    """
    return _parsed(read_file(manifest)).keys()


def partial_updates(path: str) -> int:
    """Return how many updates are in some of a checkpoint's variables and not in others; 0 if that is not known."""
    try:
        manifest = json.loads(patiently(lambda: read_file(file_of(path, MANIFEST))))
        return int(manifest.get("partial_updates", 0))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 0  # written by plain TensorFlow


def write_flushed(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flushed(path: Path) -> _File:
    """Flush a file to the disk, and read it at the same time, while it is still in memory."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as apart:
        flushing = apart.submit(os.fsync, file.fileno())
        found = _read(file)
        flushing.result()
    return found


def _read(file: io.FileIO) -> _File:
    block = memoryview(bytearray(_BLOCK_BYTES))
    size = crc = 0
    while count := file.readinto(block):
        size, crc = size + count, zlib.crc32(block[:count], crc)
    return _File(size, crc)


def problem(path: str, read_data: bool = True) -> str | None:
    """Return the damage of a checkpoint, naming the file; ``None`` if it is intact, as far as can be checked.

    Args:
        path: The checkpoint, without a suffix.
        read_data: Whether to read the data files, too, if there is a manifest. Restoring reads them anyway, and
            TensorFlow then compares its own checksum.
    """
    try:
        return damage(path, read_data)
    except OSError as error:
        return unreadable(path, error)


def unreadable(path: str, error: OSError) -> str:
    """Return why a checkpoint cannot be read now, in words."""
    return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"


def damage(path: str, read_data: bool = True) -> str | None:
    """Do the same as ``problem``, for callers that ask again.

    Raises:
        OSError: If a file is there and cannot be read, for a reason that may pass.
    """
    try:
        return patiently(lambda: _problem(path, read_data))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"


def _problem(path: str, read_data: bool) -> str | None:
    manifest = file_of(path, MANIFEST)
    file_of(path, INDEX).stat()
    if not manifest.exists():
        return _unlike_index(path)
    if not (text := read_file(manifest)):
        return f"{manifest.name} is empty"
    try:
        files = _parsed(text)
    except ValueError:
        return f"{manifest.name} is garbled"
    return _unlike_manifest(path, files, read_data)


def _parsed(text: bytes) -> Mapping[str, _File]:
    """Return the files in a manifest; raise ``ValueError`` if it is damaged."""
    try:
        manifest = json.loads(text)
        files = {suffix: _File(**written) for suffix, written in manifest["files"].items()}
        as_written = manifest.keys() == {"files"} or manifest.pop("crc32") == _crc32_of(manifest)
    except (TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError from None
    if INDEX not in files or len(files) < 2 or not as_written:
        raise ValueError
    return files


def _unlike_manifest(path: str, files: Mapping[str, _File], read_data: bool) -> str | None:
    for suffix, written in files.items():
        if (size := file_of(path, suffix).stat().st_size) != written.bytes:
            return f"{file_of(path, suffix).name} has {size} bytes instead of {written.bytes}"
    for suffix, written in files.items():
        if not (read_data or suffix == INDEX):
            continue
        with open_file(file_of(path, suffix)) as file:
            if _read(file) != written:
                return f"{file_of(path, suffix).name} is not what was written: its checksum differs"
    return None


def _unlike_index(path: str) -> str | None:
    index = file_of(path, INDEX)
    try:
        needed = _needed(index)
    except ValueError as error:
        return f"{index.name} is garbled: {error}"
    for suffix, least in needed.items():
        if (size := file_of(path, suffix).stat().st_size) < least:
            return f"{file_of(path, suffix).name} has {size} bytes instead of {least}"
    return None


def _needed(index: Path) -> Mapping[str, int]:
    """Return the data files that an index needs, as in a manifest, and the least size of each."""
    sizes = data_sizes(read_file(index))
    return {f"data-{shard:05}-of-{len(sizes):05}": least for shard, least in enumerate(sizes) if least}
