"""`digest_weights`, what tells one checkpoint's weights from another's, and `stamp_files`, whether files changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from sglang.srt.configs.gguf_model import GGUF_LINK, read_tensor_list
from sglang.srt.configs.model_files import QUANTIZATION_FILES, is_gguf

_MAX_THREADS = 8
_MOUNTS = Path("/proc/self/mountinfo")


class FileStamp(NamedTuple):
    """Differs once a file was replaced or written, or got another mode, owner or number of links."""

    name: str
    # Device, inode and the time of its last change, which cannot be set. None for a file in a FUSE mount, such as a
    # bucket, which may change them while the file stays as it is.
    place: tuple[int, int, int] | None
    size: int
    mtime_ns: int


class _Tensor(NamedTuple):
    """begin, end: of its bytes in the file."""

    described: str
    begin: int
    end: int


def digest_weights(local_path: Path, load_format: str) -> bytes:
    """Of the names, types, shapes and bytes of all tensors; not of their order in a file, nor of what a file tells of
    itself. Reads as fast as memory where loading has left the files there. load_format: as given to `load_model`."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "digest") as threads:
        if is_gguf(local_path, load_format):
            _add(digest, threads, local_path / GGUF_LINK, _gguf_tensors(local_path))
        else:
            for path in sorted(local_path.glob("*.safetensors")):
                digest.update(path.name.encode())
                _add(digest, threads, path, _safetensors(path))
    return digest.digest()


def stamp_files(local_path: Path) -> tuple[FileStamp, ...]:
    """Of config and weights, behind all links."""
    names = [path for path in local_path.iterdir() if path.suffix in (".safetensors", ".gguf")]
    names += [local_path / name for name in ("config.json", *QUANTIZATION_FILES)]
    stats = [(path.name, path.stat()) for path in sorted(names) if path.exists()]
    fuse = _fuse_mounts()

    def place(at: os.stat_result) -> tuple[int, int, int] | None:
        is_fuse = f"{os.major(at.st_dev)}:{os.minor(at.st_dev)}" in fuse
        return None if is_fuse else (at.st_dev, at.st_ino, at.st_ctime_ns)

    return tuple(FileStamp(name, place(at), at.st_size, at.st_mtime_ns) for name, at in stats)


def _fuse_mounts() -> set[str]:
    """Devices, as in "0:45". Paths in the list have any bytes but spaces and line breaks."""
    lines = _MOUNTS.read_bytes().split(b"\n") if _MOUNTS.exists() else []
    mounts = [line.partition(b" - ") for line in lines if b" - " in line]
    return {fields.split(b" ")[2].decode() for fields, _, kind in mounts if kind.startswith(b"fuse")}


def _add(digest: hashlib._Hash, threads: ThreadPoolExecutor, path: Path, tensors: Iterator[_Tensor]) -> None:
    data, listed = np.memmap(path, np.uint8, mode="r"), list(tensors)
    # No cryptographic hash: who may write the weights may write anything.
    hashes = threads.map(lambda tensor: xxhash.xxh3_128_digest(data[tensor.begin : tensor.end].data), listed)
    for tensor, tensor_hash in zip(listed, hashes, strict=True):
        digest.update(tensor.described.encode() + tensor_hash)


def _safetensors(path: Path) -> Iterator[_Tensor]:
    """Layout of the file: 8 bytes header length (little endian), JSON header, tensors at the header's offsets."""
    with path.open("rb") as f:
        header_len = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(header_len))
    # Writers may order and pad the header at will; "__metadata__" is free text.
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            described = f"{name} {entry['dtype']} {entry['shape']}"
            yield _Tensor(described, 8 + header_len + begin, 8 + header_len + end)


def _gguf_tensors(local_path: Path) -> Iterator[_Tensor]:
    for name, entry in sorted(read_tensor_list(local_path).items()):
        yield _Tensor(f"{name} {entry.type} {entry.shape}", entry.offset, entry.offset + entry.size_bytes)
