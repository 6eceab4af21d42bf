"""Which rank writes which piece of which value."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.layout import cover
from hyper_parallel.checkpoint.tensor_files import num_bytes
from hyper_parallel.checkpoint.values import Value

__all__ = ["described", "plan_part"]


def described(value: Value) -> list:
    """What the other ranks must know of a value, as plain JSON."""
    return [value.dtype, value.shape, [[piece.offsets, piece.shape] for piece in value.pieces]]


def plan_part(held: Sequence[Mapping[str, Any]], load: list[int]) -> dict[str, dict]:
    """The manifest's entry of every value, with the writing rank in each piece.

    Args:
        held: per rank, ``described`` of its values by name.
        load: per rank, the bytes that it has to write so far; those of this part are added.

    Raises:
        CheckpointError: values that differ in dtype or shape, or that the ranks together do not hold.
    """
    holders: dict[str, dict] = {}
    kinds: dict[str, tuple] = {}
    for rank, values in enumerate(held):
        for name, (dtype, shape, pieces) in values.items():
            kind = kinds.setdefault(name, (dtype, shape))
            if kind != (dtype, shape):
                raise CheckpointError(f"{name} is {kind[0]} {kind[1]} on one rank and {dtype} {shape} on rank {rank}")
            for offsets, size in pieces:
                holders.setdefault(name, {}).setdefault((tuple(offsets), tuple(size)), []).append(rank)
    entries = {}
    for name, (dtype, shape) in kinds.items():
        boxes = holders.get(name, {})
        if not boxes and 0 in shape:  # nothing to hold, but a name and a shape
            boxes = {((0,) * len(shape), tuple(shape)): [0]}
        if not cover(shape, list(boxes)):
            raise CheckpointError(
                f"the ranks together do not hold all of {name}, or hold it cut in two ways, which cannot be saved"
            )
        pieces = []
        for (offsets, size), ranks in boxes.items():
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += num_bytes(dtype, size)
            pieces.append({"rank": writer, "offsets": list(offsets), "shape": list(size)})
        entries[name] = {"dtype": dtype, "shape": list(shape), "pieces": pieces}
    return entries
