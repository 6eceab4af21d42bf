"""How a weight is made of stored tensors: where each lies in it, without a byte being read.

What transformers does with whole tensors when it loads a folder, stacking experts or joining gate and up, is done here
with boxes: a rank then knows which bytes of which stored tensor are its own, and may read or write only these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Assembled", "Box", "chunk", "concatenate", "missing_members", "stack", "stored", "transpose"]


@dataclass(frozen=True)
class Box:
    """A stored tensor as a box of a weight.

    Attributes:
        tensor: its name in the folder.
        offsets: where it begins in the weight; before it, where the weight is only a part of what is stored.
        shape: of the box, in the weight's dims.
        strides: of the stored tensor along the weight's dims, in elements.
    """

    tensor: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Assembled:
    """A tensor of this shape, made of boxes."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def stored(name: str, shape: Sequence[int]) -> Assembled:
    """A tensor of the folder as it lies there."""
    shape = tuple(shape)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Assembled(shape, (Box(name, (0,) * len(shape), shape, strides),))


def stack(parts: Sequence[Assembled], dim: int) -> Assembled:
    """Tensors of one shape one behind the other along a new dim."""
    _same([part.shape for part in parts])
    shape = _inserted(parts[0].shape, dim, len(parts))
    boxes = [
        Box(
            box.tensor,
            _inserted(box.offsets, dim, index),
            _inserted(box.shape, dim, 1),
            _inserted(box.strides, dim, math.prod(box.shape)),
        )
        for index, part in enumerate(parts)
        for box in part.boxes
    ]
    return Assembled(shape, tuple(boxes))


def concatenate(parts: Sequence[Assembled], dim: int) -> Assembled:
    """Tensors one behind the other along a dim that they have."""
    _same([_replaced(part.shape, dim, 0) for part in parts])
    boxes: list[Box] = []
    start = 0
    for part in parts:
        boxes += [replace(box, offsets=_replaced(box.offsets, dim, box.offsets[dim] + start)) for box in part.boxes]
        start += part.shape[dim]
    return Assembled(_replaced(parts[0].shape, dim, start), tuple(boxes))


def chunk(whole: Assembled, parts: int, dim: int) -> list[Assembled]:
    """Equal parts of a tensor along a dim."""
    if whole.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {whole.shape} is not divisible by {parts}")
    size = whole.shape[dim] // parts
    return [
        Assembled(
            _replaced(whole.shape, dim, size),
            tuple(
                replace(box, offsets=_replaced(box.offsets, dim, box.offsets[dim] - part * size)) for box in whole.boxes
            ),
        )
        for part in range(parts)
    ]


def transpose(whole: Assembled, dim: int, other: int) -> Assembled:
    """A tensor with two dims exchanged."""
    swapped = [
        Box(box.tensor, *(_swapped(numbers, dim, other) for numbers in (box.offsets, box.shape, box.strides)))
        for box in whole.boxes
    ]
    return Assembled(_swapped(whole.shape, dim, other), tuple(swapped))


def missing_members(names: Sequence[str], count: int) -> list[str]:
    """Names of a numbered series, such as ``experts.0.w1``, that are not there.

    Args:
        names: differ in one dotted component, a number. count: how many there should be, counted from 0.
    """
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return []
    places = [place for place, column in enumerate(zip(*parts)) if all(text.isdigit() for text in column)]
    places = [place for place in places if len({part[place] for part in parts}) == len(parts)]
    if not places:
        return []
    place = places[-1]
    there = {int(part[place]) for part in parts}
    return [
        ".".join([*parts[0][:place], str(number), *parts[0][place + 1 :]])
        for number in range(count)
        if number not in there
    ]


def _same(shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(f"shapes differ: {' and '.join(map(str, dict.fromkeys(shapes)))}")


def _inserted(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim:])


def _replaced(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _swapped(numbers: tuple[int, ...], dim: int, other: int) -> tuple[int, ...]:
    swapped = list(numbers)
    swapped[dim], swapped[other] = swapped[other], swapped[dim]
    return tuple(swapped)
