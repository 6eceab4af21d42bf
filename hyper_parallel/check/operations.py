"""Every collective that the library uses, with results known in advance.

Faults of a cluster often show as wrong numbers, not as errors: the all-to-alls of CANN 8.3.RC2 are reported to give
zeros on more than two ranks (candle-org/MindAct, pull request 2498). Every rank works out alone what it must receive:
rank r sends r * 100 + 1, r * 100 + 2, ..., so that a value says where it comes from, and none is 0. Some faults show in
large messages only, which backends cut up and send by other ways, or in bfloat16, which they add by other code.

Shape suffixes: P ranks of a group, R rows, D model size.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hyper_parallel.check.probe import Axis, Probe
from hyper_parallel.core.dtensor import distribute_tensor
from hyper_parallel.core.placement_types import Replicate, Shard

__all__ = ["OPERATIONS", "run_operation"]

# A row small enough for one packet, and one that is not.
WIDTHS = (4, 4096)
# Of one rank's message in float32: 8 MB.
LARGE = 2**21
# Whole numbers up to this one are exact in bfloat16.
EXACT = 256


def run_operation(operation: str, probe: Probe, axis: Axis) -> str | None:
    """None if ``operation`` gave on this rank what it must, or what was wrong, in words.

    Args:
        operation: a key of ``OPERATIONS``.
    """
    # All collectives first: a rank that stopped at a wrong result would leave the others waiting.
    results = OPERATIONS[operation](probe, axis, f"check: {operation} over {axis.name}")
    differences = filter(None, (_difference(*result) for result in results))
    return next((f"{operation} over {axis.name}, ranks {list(axis.ranks)}: {words}" for words in differences), None)


def _difference(received: npt.ArrayLike, expected: npt.ArrayLike, sources: npt.ArrayLike) -> str | None:
    """What is wrong unless the rows of ``received`` [R, D] hold ``expected`` [R], from the ranks ``sources`` [R]."""
    received, expected = np.asarray(received, np.float64), np.asarray(expected, np.float64)
    if len(received) != len(expected):
        return f"expected {len(expected)} rows, received {len(received)}"
    if len(expected) == 0:
        return None
    received = received.reshape(len(received), -1)
    wrong = (received != expected[:, None]).any(axis=1)
    if not wrong.any():
        return None
    first = int(wrong.argmax())
    values = received[first]
    value = values[values != expected[first]][0]
    ranks = sorted({int(rank) for rank in np.asarray(sources)[wrong]})
    return (
        f"{int(wrong.sum())} of {len(expected)} rows wrong, from ranks {ranks}; "
        f"the first holds {value:g} in place of {expected[first]:g}"
    )


# What an operation returns, several times: (received, expected, source ranks), row by row.
Result: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]


def _exchange_counts(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    num_ranks = len(axis.ranks)
    counts = probe.int_tensor([axis.rank * 100 + i + 1 for i in range(2 * num_ranks)])
    arriving = probe.platform.start_counts_exchange(counts, axis.mesh.get_group(), name)
    (received,) = probe.platform.to_host(arriving.wait())
    expected = [rank * 100 + 2 * axis.position + i + 1 for rank in axis.ranks for i in range(2)]
    return [(received, expected, np.repeat(axis.ranks, 2))]


def _exchange_rows(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    """Every rank sends 0, 1 or 2 rows to each."""
    places = np.arange(len(axis.ranks))
    return _all_to_all(probe, axis, name, (places[:, None] + 2 * places + 1) % 3)


def _exchange_to_first(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    """All rows go to the first rank: the others receive nothing, and it receives unequal numbers."""
    counts_PP = np.zeros((len(axis.ranks),) * 2, np.int64)
    counts_PP[:, 0] = 3 + np.arange(len(axis.ranks))
    return _all_to_all(probe, axis, name, counts_PP)


def _all_to_all(probe: Probe, axis: Axis, name: str, counts_PP: np.ndarray) -> Sequence[Result]:
    """Send ``counts_PP[s, t]`` rows from place s to place t."""
    send, receive = counts_PP[axis.position].tolist(), counts_PP[:, axis.position].tolist()
    starts = counts_PP[:, : axis.position].sum(axis=1)
    expected = [rank * 100 + start + i + 1 for rank, start, n in zip(axis.ranks, starts, receive) for i in range(n)]
    results = []
    for width in WIDTHS:
        rows = probe.rows([axis.rank * 100 + i + 1 for i in range(sum(send))], width)
        received = probe.platform.all_to_all_rows(rows, tuple(send), tuple(receive), axis.mesh.get_group(), name)
        results.append((probe.array(received), expected, np.repeat(axis.ranks, receive)))
    return results


def _all_reduce(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    results = []
    for width in WIDTHS:
        rows = probe.rows([axis.rank * 100 + i + 1 for i in range(3)], width)
        summed = probe.platform.sum_over_group(rows, axis.mesh.get_group(), name)
        expected = [100 * sum(axis.ranks) + len(axis.ranks) * (i + 1) for i in range(3)]
        # A sum does not come from one rank; it is where it was found that matters.
        results.append((probe.array(summed), expected, [axis.rank] * 3))
    return results


def _exchange_large(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    """8 MB from every rank, an equal part for each."""
    return _exchange_one_row(probe, axis, name, LARGE // len(axis.ranks), "float32", lambda rank: rank * 100 + 1)


def _exchange_bfloat16(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    return _exchange_one_row(probe, axis, name, WIDTHS[1], "bfloat16", lambda rank: rank % (EXACT - 1) + 1)


def _exchange_one_row(
    probe: Probe, axis: Axis, name: str, width: int, dtype: str, value_of: Callable[[int], int]
) -> Sequence[Result]:
    one_each = (1,) * len(axis.ranks)
    rows = probe.rows([value_of(axis.rank)] * len(axis.ranks), width, dtype)
    received = probe.platform.all_to_all_rows(rows, one_each, one_each, axis.mesh.get_group(), name)
    return [(probe.array(received), [value_of(rank) for rank in axis.ranks], axis.ranks)]


def _reduce_large(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    summed = probe.platform.sum_over_group(probe.rows([axis.rank + 1], LARGE), axis.mesh.get_group(), name)
    return [(probe.array(summed), [sum(axis.ranks) + len(axis.ranks)], [axis.rank])]


def _reduce_bfloat16(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    """Numbers of the first ranks only: their sums are exact in bfloat16, in whatever order they are formed."""
    terms = [place + 1 if place < 16 else 0 for place in range(len(axis.ranks))]
    rows = probe.rows([terms[axis.position]], WIDTHS[1], "bfloat16")
    summed = probe.platform.sum_over_group(rows, axis.mesh.get_group(), name)
    return [(probe.array(summed), [sum(terms)], [axis.rank])]


def _broadcast(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    rows = probe.rows([axis.rank * 100 + i + 1 for i in range(3)], WIDTHS[0])
    copy = distribute_tensor(rows, axis.mesh, [Replicate()]).to_local()
    return [(probe.array(copy), [axis.ranks[0] * 100 + i + 1 for i in range(3)], [axis.ranks[0]] * 3)]


def _scatter_and_gather(probe: Probe, axis: Axis, name: str, width: int = WIDTHS[0]) -> Sequence[Result]:
    """How weights are laid out and put together again."""
    num_rows = 2 * len(axis.ranks)
    rows = probe.rows([axis.rank * 100 + i + 1 for i in range(num_rows)], width)
    sharded = distribute_tensor(rows, axis.mesh, [Shard(0)])
    whole = sharded.full_tensor()
    expected = [axis.ranks[0] * 100 + i + 1 for i in range(num_rows)]
    start = 2 * axis.position
    return [
        (probe.array(sharded.to_local()), expected[start : start + 2], [axis.ranks[0]] * 2),
        (probe.array(whole), expected, np.repeat(axis.ranks, 2)),
    ]


def _scatter_and_gather_large(probe: Probe, axis: Axis, name: str) -> Sequence[Result]:
    return _scatter_and_gather(probe, axis, name, LARGE // (2 * len(axis.ranks)))


OPERATIONS: dict[str, Callable[[Probe, Axis, str], Sequence[Result]]] = {
    "all-to-all of counts": _exchange_counts,
    "all-to-all of rows": _exchange_rows,
    "all-to-all to one rank": _exchange_to_first,
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "scatter and all-gather": _scatter_and_gather,
    "all-to-all of 8 MB": _exchange_large,
    "all-reduce of 8 MB": _reduce_large,
    "scatter and all-gather of 8 MB": _scatter_and_gather_large,
    "all-to-all in bfloat16": _exchange_bfloat16,
    "all-reduce in bfloat16": _reduce_bfloat16,
}
