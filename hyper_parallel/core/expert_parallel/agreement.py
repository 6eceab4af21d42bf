"""What the ranks of an ep group must agree on before rows move, checked on the way of the counts.

A rank whose rows have another dtype or width sends messages of another size than its partners wait for, and a backend
ends the wrong process, or hands over other numbers. So a few integers that describe what a rank is about to send travel
with its counts to everybody, and all ranks raise the same error.

Shape suffixes: P ranks of the ep group, L experts of one rank, F fields.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Sending", "agreed_counts", "described", "ranks_of"]

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
        dtypes = ("none" if value is None else platform.dtype_name(value) for value in (x, scores))
        codes = [DTYPES.index(name) if name in DTYPES else OTHER for name in dtypes]
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
    parts = [
        f"{_word(field, value)} on {', '.join(name for name, other in zip(names, values) if other == value)}"
        for value in sorted(set(values))
    ]
    return (
        f"ranks that exchange rows must call with the same {what}, but it is {', '.join(parts)}; no row was sent. "
        + REMEDIES[field]
    )


REMEDIES = (
    "Cast x on every rank to the dtype of the weights",
    "Every rank needs the same model",
    "Give scores of one dtype on every rank, or on none",
    "Where one rank's x comes from layers that are trained and another's does not, call x.requires_grad_() there",
)


def _word(field: int, value: int) -> str:
    if field in (0, 2):
        return DTYPES[value] if value < OTHER else "another"
    return str(value) if field == 1 else ("there" if value else "absent")


def ranks_of(mesh: Mesh) -> Callable[[], list[str]]:
    """Names for the ranks of a 1-D mesh, in its order; asked for only when they are needed."""
    return lambda: [f"rank {rank}" for rank in mesh.mesh.tolist()]
