"""A tensor of a module or optimizer as checkpoints see it, whatever the framework."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyper_parallel.checkpoint.layout import Piece

__all__ = ["Value", "STORED_AS", "FLOATS", "converted", "plain_name"]

# numpy's dtype for the bytes of each dtype of safetensors; what numpy does not have lies in integers of its size.
STORED_AS: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


# Dtypes that are numbers by themselves; an 8-bit one needs scales that lie elsewhere.
FLOATS = ("F64", "F32", "F16", "BF16")


# What wrappers put into the names of what they wrap: activation checkpointing and compilation of torch.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A dotted name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def converted(array: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """The values of an array in the storage dtype of ``dtype``, in that of ``to``; both of ``FLOATS``.

    Rounds to nearest, ties to even, as the frameworks do; float64 becomes bfloat16 by way of float32.

    Raises:
        FloatingPointError: a finite value that is too large for float16 or float32.
    """
    if dtype == to:
        return array
    values = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array
    with np.errstate(over="raise", under="ignore", invalid="ignore"):
        if to != "BF16":
            return values.astype(STORED_AS[to])
        values = values.astype(np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(STORED_AS["BF16"])


@dataclass(frozen=True)
class Value:
    """One tensor, of which this rank holds some pieces.

    Attributes:
        dtype: a key of ``STORED_AS``.
        shape: of the whole tensor. local_shape: of this rank's part.
        pieces: where this rank's part lies in the whole.
        read: () -> this rank's part as numpy, in the storage dtype; may share memory with the tensor.
        write: puts such an array back into the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]
