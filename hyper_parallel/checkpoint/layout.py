"""Which part of a whole tensor lies on a rank: arithmetic of placements, on numbers alone."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Cut", "Piece", "local_pieces", "overlap", "cover"]


@dataclass(frozen=True)
class Cut:
    """What one mesh axis does to a tensor.

    The dim is split into ``groups`` runs, each run into one chunk per rank, and rank r holds the r-th chunk of every
    run. ``Shard(dim)`` has one group; torch's ``_StridedShard(dim, split_factor)`` has ``split_factor``.
    """

    dim: int
    groups: int = 1


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and where it lies in the rank's local tensor.

    Attributes:
        offsets, shape: the box, in elements of the whole tensor.
        local: one slice per dim of the local tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[slice, ...]


def local_pieces(
    shape: Sequence[int], cuts: Sequence[Cut | None], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], list[Piece]]:
    """The local shape of a rank, and the boxes of the whole tensor that it holds (none if it holds no element).

    Args:
        shape: of the whole tensor.
        cuts: one per mesh axis, in order, ``None`` for an axis that replicates.
        mesh_shape: sizes of the axes. coordinate: the rank's, one per axis.

    Chunks follow torch: the first ones have ``ceil(size / ranks)`` elements, later ones may be smaller or empty.
    """
    held = [np.arange(size) for size in shape]
    for cut, size, place in zip(cuts, mesh_shape, coordinate):
        if cut is not None:
            runs = _chunks(held[cut.dim], cut.groups)
            held[cut.dim] = np.concatenate([_chunk(run, size, place) for run in runs])
    local_shape = tuple(len(indices) for indices in held)
    runs_of_dims = [_runs(indices) for indices in held]
    pieces = [
        Piece(
            tuple(offset for offset, _, _ in box),
            tuple(size for _, size, _ in box),
            tuple(slice(start, start + size) for _, size, start in box),
        )
        for box in itertools.product(*runs_of_dims)
    ]
    return local_shape, pieces


def _chunk(indices, parts, part):
    size = -(-len(indices) // parts)
    return indices[part * size : (part + 1) * size]


def _chunks(indices, parts):
    return [_chunk(indices, parts, part) for part in range(parts)]


def _runs(indices):
    """(first index, length, position) of each run of consecutive indices."""
    if len(indices) == 0:
        return []
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), end - start, start) for start, end in zip(starts, ends)]


def overlap(
    offsets: Sequence[int], shape: Sequence[int], other_offsets: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, shape) of the box that two boxes share, or None."""
    first = tuple(max(a, b) for a, b in zip(offsets, other_offsets))
    last = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, shape, other_offsets, other_shape))
    size = tuple(end - start for start, end in zip(first, last))
    return (first, size) if all(n > 0 for n in size) else None


def cover(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether distinct boxes (offsets, shape) fill a tensor of this shape without overlap."""
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    ordered = sorted(boxes)
    return not any(overlap(*a, *b) for a, b in itertools.combinations(ordered, 2)) if len(ordered) <= 64 else True
