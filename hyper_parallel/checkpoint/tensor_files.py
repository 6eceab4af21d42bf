"""Files of the safetensors format: eight bytes that give the length of a JSON header, the header, the tensors.

The format is small, and its own package can neither write a tensor after the other nor hand numpy a bfloat16, so it is
written and read here. Header of each tensor: its dtype, its shape, and where its bytes lie after the header.

A file may hold slices of larger tensors under the whole tensors' names. Their offsets then stand in the metadata as
torch's distributed checkpoints write them, and as its ``HuggingFaceStorageReader`` reads them
(torch/distributed/checkpoint/_hf_utils.py).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.values import STORED_AS

__all__ = [
    "Slice",
    "Stored",
    "num_bytes",
    "write_file",
    "whole_header",
    "read_header",
    "read_box",
    "write_box",
    "closing_all",
    "checksum",
]

CHUNK = 1 << 20
# Runs of bytes shorter than this are read in one go with what lies between them: one long read beats many short ones.
WINDOW = 1 << 18


@dataclass(frozen=True)
class Slice:
    """A box of a whole tensor to be written; ``values()`` gives its elements in the storage dtype."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``start`` is the position of its first byte, and ``dtype`` what the header calls it."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor of this dtype (a key of ``STORED_AS``) and shape."""
    return STORED_AS[dtype].itemsize * math.prod(shape)


def write_file(path: Path, slices: Sequence[Slice], advance: Callable[[int], None]) -> tuple[dict, dict[str, int]]:
    """Write slices, which have different names, one after the other, and see them on the disk.

    Args:
        advance: told the number of bytes after each part that was written.

    Returns:
        ``{"bytes", "sha256"}`` of the file, and the position of each slice's first byte by its name.
    """
    # Wide dtypes first, so that each tensor begins at a multiple of its size.
    slices = sorted(slices, key=lambda item: (-STORED_AS[item.dtype].itemsize, item.name))
    header, position, starts = _header(slices)
    digest = hashlib.sha256(header)
    with open(path, "xb") as stream:
        stream.write(header)
        for item in slices:
            starts[item.name] += len(header)
            values = np.ascontiguousarray(item.values(), STORED_AS[item.dtype])
            if values.size != math.prod(item.shape):
                raise AssertionError(f"{item.name}: {values.size} values for a slice of shape {item.shape}")
            data = memoryview(values.reshape(-1).view(np.uint8))
            for start in range(0, len(data), CHUNK):
                part = data[start : start + CHUNK]
                stream.write(part)
                digest.update(part)
                advance(len(part))
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": len(header) + position, "sha256": digest.hexdigest()}, starts


def _header(slices):
    offsets = {item.name: {"saved_offsets": list(item.offsets)} for item in slices}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return _encoded({item.name: (item.dtype, item.shape) for item in slices}, metadata)


def _encoded(tensors, metadata):
    described = {"__metadata__": metadata}
    position, starts = 0, {}
    for name, (dtype, shape) in tensors.items():
        end = position + num_bytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        starts[name], position = position, end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position, starts


def whole_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int, dict[str, int]]:
    """The header of a file of whole tensors, as Hugging Face writes it.

    Args:
        tensors: (dtype, shape) by name.

    Returns:
        The header, the size of the file, and the position of each tensor's first byte.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-STORED_AS[item[1][0]].itemsize, item[0])))
    header, size, starts = _encoded(ordered, {"format": "pt"})
    return header, len(header) + size, {name: len(header) + start for name, start in starts.items()}


def read_header(path: Path) -> dict[str, Stored]:
    """Where each tensor of a file lies. Raises CheckpointError for a file that is truncated, or no such file."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} is truncated, or no safetensors file: it has {size} bytes")
        text = stream.read(length)
    try:
        described = json.loads(text)
        described.pop("__metadata__", None)
        found = {
            name: (Stored(item["dtype"], tuple(item["shape"]), 8 + length + item["data_offsets"][0]), item)
            for name, item in described.items()
        }
        end = max((8 + length + item["data_offsets"][1] for _, item in found.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error
    if end > size:
        raise CheckpointError(f"{path} is truncated: it has {size} of {end} bytes")
    return {name: stored for name, (stored, _) in found.items()}


@contextmanager
def closing_all() -> Iterator[dict[str, Any]]:
    """A dict for files by name, to be opened when they are needed; all are closed at the end."""
    streams: dict[str, Any] = {}
    try:
        yield streams
    finally:
        for stream in streams.values():
            stream.close()


def read_box(
    stream,
    start: int,
    shape: Sequence[int],
    lower: Sequence[int],
    out: np.ndarray,
    strides: Sequence[int] | None = None,
) -> int:
    """Read a box of the slice of this shape that begins at byte ``start``, and no more than a window beside it.

    Args:
        stream: the file, unbuffered. lower: first index of the box in the slice, one per dim.
        out: array of the box's shape, which is filled.
        strides: of the slice in the file, in elements; those of its shape unless it is stored in another order.

    Returns:
        Number of bytes read.
    """
    return _read(stream, *_placed(start, shape, lower, out.itemsize, strides), out)


def write_box(
    stream,
    start: int,
    shape: Sequence[int],
    lower: Sequence[int],
    values: np.ndarray,
    strides: Sequence[int] | None = None,
) -> None:
    """Write a box of a slice, and not a byte beside it: other processes may write other boxes at the same time.

    Args:
        as those of ``read_box``.
    """
    _write(stream, *_placed(start, shape, lower, values.itemsize, strides), values)


def _placed(start, shape, lower, itemsize, strides):
    """The position of a box's first byte, and its strides in bytes."""
    strides = strides or [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    strides = [itemsize * stride for stride in strides]
    return start + sum(index * stride for index, stride in zip(lower, strides)), strides


def _write(stream, first, strides, values):
    if values.size == 0:
        return
    if _in_order(values, strides):
        data = memoryview(values.reshape(-1).view(np.uint8))
        while len(data):
            count = os.pwrite(stream.fileno(), data, first)
            data, first = data[count:], first + count
        return
    dim = _outermost(values.shape, strides)
    for index in range(values.shape[dim]):
        part = (slice(None),) * dim + (slice(index, index + 1),)
        _write(stream, first + index * strides[dim], strides, values[part])


def _in_order(array, strides):
    """Whether a box lies in a file as it does in memory, and without gaps in either."""
    pairs = zip(array.shape, array.strides, strides)
    return array.flags.c_contiguous and all(size == 1 or here == there for size, here, there in pairs)


def _outermost(shape, strides):
    """The dim in which a box in a file reaches farthest."""
    return max(range(len(shape)), key=lambda dim: (shape[dim] - 1) * strides[dim])


def _read(stream, first, strides, out):
    if out.size == 0:
        return 0
    if _in_order(out, strides):
        _fill(stream, first, memoryview(out.reshape(-1).view(np.uint8)))
        return out.nbytes
    span = out.itemsize + sum((size - 1) * stride for size, stride in zip(out.shape, strides))
    if span <= WINDOW:
        buffer = bytearray(span)
        _fill(stream, first, memoryview(buffer))
        out[...] = np.ndarray(out.shape, out.dtype, buffer, strides=strides)
        return span
    dim = _outermost(out.shape, strides)
    half = out.shape[dim] // 2
    low, high = [(slice(None),) * dim + (part,) for part in (slice(half), slice(half, None))]
    return _read(stream, first, strides, out[low]) + _read(stream, first + half * strides[dim], strides, out[high])


def _fill(stream, position, view):
    stream.seek(position)
    while len(view):
        count = stream.readinto(view)
        if not count:
            raise OSError(f"{stream.name} ends {len(view)} bytes early")
        view = view[count:]


def checksum(path: Path) -> dict:
    """``{"bytes", "sha256"}`` of a file."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}
