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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.values import STORED_AS

__all__ = ["Slice", "Stored", "num_bytes", "write_file", "read_header", "read_box", "checksum"]

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
    described = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}}
    position, starts = 0, {}
    for item in slices:
        end = position + num_bytes(item.dtype, item.shape)
        described[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [position, end]}
        starts[item.name], position = position, end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position, starts


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


def read_box(stream, start: int, shape: Sequence[int], lower: Sequence[int], out: np.ndarray) -> int:
    """Read a box of the slice of this shape that begins at byte ``start``, and no more than a window beside it.

    Args:
        stream: the file, unbuffered. lower: first index of the box in the slice, one per dim.
        out: array of the box's shape, which is filled.

    Returns:
        Number of bytes read.
    """
    strides = [out.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = start + sum(index * stride for index, stride in zip(lower, strides))
    return _read(stream, first, strides, out)


def _read(stream, first, strides, out):
    if out.size == 0:
        return 0
    span = out.itemsize + sum((size - 1) * stride for size, stride in zip(out.shape, strides))
    if span == out.nbytes and out.flags.c_contiguous:
        _fill(stream, first, memoryview(out.reshape(-1).view(np.uint8)))
        return span
    if span <= WINDOW:
        buffer = bytearray(span)
        _fill(stream, first, memoryview(buffer))
        out[...] = np.ndarray(out.shape, out.dtype, buffer, strides=strides)
        return span
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
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
