"""What ranks must agree on: at ``apply`` the module, over the whole mesh; before rows move, what each is about to send.

A rank whose rows have another dtype or width sends messages of another size than its partners wait for, and a backend
ends the wrong process, or hands over other numbers. So a few integers that describe what a rank is about to send travel
with its counts to everybody, and all ranks raise the same error.

Shape suffixes: P ranks of the ep group, or of the mesh; L experts of one rank, F fields.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.types import Mesh, Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Sending", "agreed_counts", "check_same", "check_same_module", "described", "ranks_of"]

DTYPES = ("none", "float16", "bfloat16", "float32", "float64")
OTHER = len(DTYPES)


class Sending(NamedTuple):
    """What a rank is about to send, as integers; the names of the fields are words for the message."""

    dtype_of_rows: int
    width_of_rows: int
    dtype_of_scores: int
    need_of_a_gradient: int

    @staticmethod
    def of(platform: Platform, x: Tensor, scores: Tensor | None) -> "Sending":
        """Describe rows or tokens x [..., D] and their scores, if there are any."""
        codes = [_code("none" if value is None else platform.dtype_name(value)) for value in (x, scores)]
        return Sending(codes[0], x.shape[-1], codes[1], int(platform.needs_gradient(x)))


def described(platform: Platform, counts_PL: Tensor, sending: Sending) -> Tensor:
    """The counts for each rank, int64 [P, L], with what this rank sends behind them: flat, P * (L + F) integers."""
    num_ranks, num_counts = counts_PL.shape
    fields_PF = platform.int_tensor(list(sending) * num_ranks, like=counts_PL).reshape((num_ranks, len(sending)))
    return platform.concat([counts_PL, fields_PF], 1).reshape((num_ranks * (num_counts + len(sending)),))


def agreed_counts(arrived: Sequence[int], num_ranks: int, names: Callable[[], list[str]]) -> np.ndarray:
    """The counts [P, L] in what arrived from the ranks, each message as :func:`described` made it.

    ``names`` gives what the ranks are called, in their order, where an error must say it.

    Raises:
        ValueError: the ranks do not all send the same kind of thing; on all of them alike.
    """
    received = np.asarray(arrived, np.int64).reshape(num_ranks, -1)
    num_counts = received.shape[1] - len(Sending._fields)
    sending_PF = received[:, num_counts:]
    if (sending_PF != sending_PF[0]).any():
        raise ValueError(_disagreement(sending_PF, names()))
    return received[:, :num_counts]


def _disagreement(sending_PF: np.ndarray, names: list[str]) -> str:
    field = int((sending_PF != sending_PF[0]).any(0).argmax())
    values = sending_PF[:, field].tolist()
    what = Sending._fields[field].replace("_", " ")
    who = _who(values, names, partial(_word, field))
    return (
        f"ranks that exchange rows must call with the same {what}, but it is {who}; no row was sent. " + REMEDIES[field]
    )


def _who(values: Sequence[int], names: Sequence[str], word: Callable[[int], str], most: int = 8) -> str:
    """Which value is found where, in words: "4 on rank 3, 8 on rank 0, rank 1, rank 2"."""
    parts = []
    for value in sorted(set(values)):
        found = [name for name, other in zip(names, values) if other == value]
        more = f" and {len(found) - most} more" if len(found) > most else ""
        parts.append(f"{word(value)} on {', '.join(found[:most])}{more}")
    return ", ".join(parts)


REMEDIES = (
    "Cast x on every rank to the dtype of the weights",
    "Every rank needs the same model",
    "Give scores of one dtype on every rank, or on none",
    "Where one rank's x comes from layers that are trained and another's does not, call x.requires_grad_() there",
)


def _word(field: int, value: int) -> str:
    if field in (0, 2):
        return _dtype(value)
    return str(value) if field == 1 else ("there" if value else "absent")


def _code(dtype: str) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else OTHER


def _dtype(code: int) -> str:
    return DTYPES[code] if code < OTHER else "another"


def ranks_of(mesh: Mesh) -> Callable[[], list[str]]:
    """Names for the ranks of a mesh, row by row; asked for only when they are needed."""
    return lambda: [f"rank {rank}" for rank in np.ravel(mesh.mesh.tolist())]


def check_same_module(platform: Platform, module: Module, shapes: Any, device_mesh: Mesh, style: str) -> None:
    """Raise ``ValueError``, on all ranks of the mesh, unless all of them are about to lay out the same kind of module.

    Otherwise they would send messages of other sizes than their partners wait for, at ``apply`` or in a later call. One
    collective of a few integers per axis of the mesh.
    """
    parameters = sorted(
        (f"{path}.{name}".lstrip("."), tuple(parameter.shape), platform.dtype_name(parameter))
        for path, child in platform.named_modules(module)
        for name, parameter in platform.parameters(child).items()
    )
    mine = {
        "style": zlib.crc32(style.encode()),
        "num_experts": getattr(shapes, "num_experts", 0),
        "hidden_dim": shapes.hidden_dim,
        "dim": shapes.dim,
        "dtype of the weights": _code(parameters[0][2]),
        "parameters": zlib.crc32(repr(parameters).encode()),
    }
    own = {"style": style, "parameters": ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in parameters)}
    must = f"{style}: all ranks of the mesh must apply the same style to the same kind of module"
    check_same(platform, mine, own, device_mesh, must, "apply: agreement on the module")


def check_same(
    platform: Platform, mine: Mapping[str, int], own: Mapping[str, str], device_mesh: Mesh, must: str, name: str
) -> None:
    """Raise ``ValueError``, on all ranks of the mesh, unless all of them are about to do the same.

    Args:
        mine: numbers that say what, none of them negative, by what they are.
        own: words for those that are digests.
        must: what all ranks must do, for the message. name: words for the collectives.
    """
    known_PF = _of_all_ranks(platform, list(mine.values()), device_mesh, name)
    for field, (what, value) in enumerate(mine.items()):
        if (known_PF[:, field] == value).all():
            continue

        def word(other: int, what: str = what, value: int = value) -> str:
            if what in own:  # only a digest of it travelled
                return own[what] if other == value else "another"
            return _dtype(other) if what.startswith("dtype") else str(other)

        who = _who(known_PF[:, field].tolist(), ranks_of(device_mesh)(), word)
        remedy = "Give every rank the same configuration and the same plan"
        raise ValueError(f"{must}, but {what} is {who}; nothing was changed. {remedy}")


def _of_all_ranks(platform: Platform, values: Sequence[int], device_mesh: Mesh, name: str) -> np.ndarray:
    """The values of every rank of the mesh, none of them negative, in its order: [P, F]."""
    shape = tuple(device_mesh.shape)
    known_PF = np.zeros((device_mesh.size(), len(values)), np.int64)
    known_PF[np.ravel_multi_index(tuple(device_mesh.get_coordinate() or ()), shape)] = values
    for axis in range(device_mesh.ndim):
        if shape[axis] > 1:
            flat = known_PF.ravel().tolist()
            over = f"{name} over {(device_mesh.mesh_dim_names or shape)[axis]}"
            group, verbs = device_mesh.get_group(axis), platform.gradients()
            # What a rank does not know yet is 0.
            known_PF = np.reshape(verbs.largest(flat, group, device_mesh.device_type, over), known_PF.shape)
    return known_PF
