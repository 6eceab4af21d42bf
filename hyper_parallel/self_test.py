"""What ``hyper_parallel.check`` runs: every collective that the library uses, with results known in advance, and
experts over a mesh against the same experts on one device.

Faults of a cluster often show as wrong numbers, not as errors: the all-to-alls of CANN 8.3.RC2 are reported to give
zeros on more than two ranks (candle-org/MindAct, pull request 2498). Every rank works out alone what it must receive:
rank r sends r * 100 + 1, r * 100 + 2, ..., so that a value says where it comes from, and none is 0.

Shape suffixes: P ranks of a group, R rows, E experts, D model size, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.dtensor import distribute_tensor
from hyper_parallel.core.expert_parallel import ExpertTensorParallel
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Bench", "Axis", "OPERATIONS", "run_operation", "TOLERANCE", "QUANTITIES", "parity_errors"]

# A row small enough for one packet, and one that is not.
WIDTHS = (4, 4096)
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
QUANTITIES = ("output", "gradient of rows", "gradient of scores", "gradient of weights")


@dataclass(frozen=True)
class Bench:
    """What is tested: the platform, and values on its device.

    Attributes:
        platform: the verbs. session: the module of that name of the platform. device_type: "cpu", "npu", ...
    """

    platform: Platform
    session: Any
    device_type: str

    def rows(self, values: npt.ArrayLike, width: int) -> Tensor:
        """[len(values), width]: each value fills a row. float32, which every backend takes."""
        values = np.repeat(np.asarray(values, np.float32)[:, None], width, axis=1)
        return self.session.tensor(values, "float32", self.device_type)

    def int_tensor(self, values: npt.ArrayLike) -> Tensor:
        return self.session.tensor(np.asarray(values, np.int64), "int64", self.device_type)

    def array(self, tensor: Tensor) -> np.ndarray:
        return self.session.array(tensor)


@dataclass(frozen=True)
class Axis:
    """One group of the mesh, as seen from this rank.

    Attributes:
        name: of the mesh axis. mesh: the 1-D mesh.
        ranks: global ranks of the group, in its order. position: this rank's place among them.
    """

    name: str
    mesh: Mesh
    ranks: tuple[int, ...]
    position: int

    @property
    def rank(self) -> int:
        return self.ranks[self.position]


def run_operation(operation: str, bench: Bench, axis: Axis) -> str | None:
    """None if ``operation`` gave on this rank what it must, or what was wrong, in words.

    Args:
        operation: a key of ``OPERATIONS``.
    """
    # All collectives first: a rank that stopped at a wrong result would leave the others waiting.
    results = OPERATIONS[operation](bench, axis, f"check: {operation} over {axis.name}")
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


def _exchange_counts(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    num_ranks = len(axis.ranks)
    counts = bench.int_tensor([axis.rank * 100 + i + 1 for i in range(2 * num_ranks)])
    arriving = bench.platform.start_counts_exchange(counts, axis.mesh.get_group(), name)
    (received,) = bench.platform.to_host(arriving.wait())
    expected = [rank * 100 + 2 * axis.position + i + 1 for rank in axis.ranks for i in range(2)]
    return [(received, expected, np.repeat(axis.ranks, 2))]


def _exchange_rows(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    """Every rank sends 0, 1 or 2 rows to each."""
    places = np.arange(len(axis.ranks))
    return _all_to_all(bench, axis, name, (places[:, None] + 2 * places + 1) % 3)


def _exchange_to_first(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    """All rows go to the first rank: the others receive nothing, and it receives unequal numbers."""
    counts_PP = np.zeros((len(axis.ranks),) * 2, np.int64)
    counts_PP[:, 0] = 3 + np.arange(len(axis.ranks))
    return _all_to_all(bench, axis, name, counts_PP)


def _all_to_all(bench: Bench, axis: Axis, name: str, counts_PP: np.ndarray) -> Sequence[Result]:
    """Send ``counts_PP[s, t]`` rows from place s to place t."""
    send, receive = counts_PP[axis.position].tolist(), counts_PP[:, axis.position].tolist()
    starts = counts_PP[:, : axis.position].sum(axis=1)
    expected = [rank * 100 + start + i + 1 for rank, start, n in zip(axis.ranks, starts, receive) for i in range(n)]
    results = []
    for width in WIDTHS:
        rows = bench.rows([axis.rank * 100 + i + 1 for i in range(sum(send))], width)
        received = bench.platform.all_to_all_rows(rows, tuple(send), tuple(receive), axis.mesh.get_group(), name)
        results.append((bench.array(received), expected, np.repeat(axis.ranks, receive)))
    return results


def _all_reduce(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    results = []
    for width in WIDTHS:
        rows = bench.rows([axis.rank * 100 + i + 1 for i in range(3)], width)
        summed = bench.platform.sum_over_group(rows, axis.mesh.get_group(), name)
        expected = [100 * sum(axis.ranks) + len(axis.ranks) * (i + 1) for i in range(3)]
        # A sum does not come from one rank; it is where it was found that matters.
        results.append((bench.array(summed), expected, [axis.rank] * 3))
    return results


def _broadcast(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    rows = bench.rows([axis.rank * 100 + i + 1 for i in range(3)], WIDTHS[0])
    copy = distribute_tensor(rows, axis.mesh, [Replicate()]).to_local()
    return [(bench.array(copy), [axis.ranks[0] * 100 + i + 1 for i in range(3)], [axis.ranks[0]] * 3)]


def _scatter_and_gather(bench: Bench, axis: Axis, name: str) -> Sequence[Result]:
    """How weights are laid out and put together again."""
    num_rows = 2 * len(axis.ranks)
    rows = bench.rows([axis.rank * 100 + i + 1 for i in range(num_rows)], WIDTHS[0])
    sharded = distribute_tensor(rows, axis.mesh, [Shard(0)])
    whole = sharded.full_tensor()
    expected = [axis.ranks[0] * 100 + i + 1 for i in range(num_rows)]
    start = 2 * axis.position
    return [
        (bench.array(sharded.to_local()), expected[start : start + 2], [axis.ranks[0]] * 2),
        (bench.array(whole), expected, np.repeat(axis.ranks, 2)),
    ]


OPERATIONS: dict[str, Callable[[Bench, Axis, str], Sequence[Result]]] = {
    "all-to-all of counts": _exchange_counts,
    "all-to-all of rows": _exchange_rows,
    "all-to-all to one rank": _exchange_to_first,
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "scatter and all-gather": _scatter_and_gather,
}


def parity_errors(bench: Bench, mesh: Mesh, dtype: str) -> dict[str, float]:
    """Relative errors, by ``QUANTITIES``, of experts over the mesh ``("ep", "tp")`` against one device.

    Both are the same framework's ``GroupedExperts``, so that only what is parallel about them differs.
    """
    ep, tp = mesh.size(0), mesh.size(1)
    ep_rank, tp_rank = mesh.get_local_rank(0), mesh.get_local_rank(1)
    problem = _problem(ep, tp)
    whole = _evaluate(bench, problem, range(ep), dtype)
    mine = _evaluate(bench, problem, [ep_rank], dtype, mesh)

    of_rank = np.concatenate([np.repeat(np.arange(ep), counts) for counts in problem["counts"].T]) == ep_rank
    errors = [_relative_error(actual, expected[of_rank]) for actual, expected in zip(mine[:3], whole[:3])]
    per_weight = []
    for name, hidden_dim in (("w1", 1), ("w2", 2), ("w3", 1)):
        expected = np.split(np.split(whole[3][name], ep, axis=0)[ep_rank], tp, axis=hidden_dim)[tp_rank]
        per_weight.append(_relative_error(mine[3][name], expected))
    return dict(zip(QUANTITIES, [*errors, max(per_weight)]))


def _problem(ep: int, tp: int) -> dict[str, Any]:
    """Weights, and rows and scores per ep rank and expert: uneven, and expert 1 has none."""
    random = np.random.default_rng(0)
    num_experts, dim, hidden_dim = 2 * ep, 32, 32 * tp
    counts = (np.arange(ep)[:, None] + 2 * np.arange(num_experts)) % 5 + 1
    counts[:, 1] = 0
    shapes = {"w1": (num_experts, hidden_dim, dim), "w2": (num_experts, dim, hidden_dim)}
    shapes["w3"] = shapes["w1"]
    return {
        "counts": counts,
        "weights": {name: random.standard_normal(shape) / np.sqrt(shape[2]) for name, shape in shapes.items()},
        "rows": [[random.standard_normal((count, dim)) for count in of_rank] for of_rank in counts],
        "scores": [[random.uniform(0.25, 1.0, count) for count in of_rank] for of_rank in counts],
    }


def _evaluate(
    bench: Bench, problem: dict[str, Any], ep_ranks: Sequence[int], dtype: str, mesh: Mesh | None = None
) -> tuple[Any, ...]:
    """Output and gradients for the rows of some ep ranks, sorted by expert; on one device without a mesh."""
    num_experts, hidden_dim, dim = problem["weights"]["w1"].shape
    experts = bench.platform.public_class("GroupedExperts")(dim, hidden_dim, num_experts)
    bench.session.fill(experts, problem["weights"], dtype, bench.device_type)
    if mesh is not None:
        ExpertTensorParallel().apply(experts, mesh)
    counts = bench.int_tensor(problem["counts"][list(ep_ranks)].sum(axis=0))
    inputs = [
        np.concatenate([problem[what][rank][expert] for expert in range(num_experts) for rank in ep_ranks])
        for what in ("rows", "scores")
    ]
    inputs = [bench.session.tensor(values, dtype, bench.device_type) for values in inputs]

    def function(rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        output = experts(rows, counts, scores)
        return (output * output).sum(), output

    output, of_inputs, of_weights = bench.session.value_and_gradients(function, inputs, experts)
    return output, *of_inputs, of_weights


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Not finite numbers, and numbers in place of nothing, are infinitely wrong."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))
