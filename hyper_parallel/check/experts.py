"""Experts over a mesh against the same experts on one device.

Shape suffixes: R rows, E experts, D model size, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.check.probe import Probe
from hyper_parallel.core.expert_parallel import ExpertTensorParallel
from hyper_parallel.core.expert_parallel.expert_parallel import HIDDEN_DIM
from hyper_parallel.core.types import Mesh, Tensor

__all__ = ["QUANTITIES", "TOLERANCE", "parity_errors"]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
QUANTITIES = ("output", "gradient of rows", "gradient of scores", "gradient of weights")


def parity_errors(probe: Probe, mesh: Mesh, dtype: str) -> dict[str, float]:
    """Relative errors, by ``QUANTITIES``, of experts over the mesh ``("ep", "tp")`` against one device.

    Both are the same framework's ``GroupedExperts``, so that only what is parallel about them differs.
    """
    ep, tp = mesh.size(0), mesh.size(1)
    ep_rank, tp_rank = mesh.get_local_rank(0), mesh.get_local_rank(1)
    problem = _problem(ep, tp)
    whole = _evaluate(probe, problem, range(ep), dtype)
    mine = _evaluate(probe, problem, [ep_rank], dtype, mesh)

    of_rank = np.concatenate([np.repeat(np.arange(ep), counts) for counts in problem["counts"].T]) == ep_rank
    errors = [_relative_error(actual, expected[of_rank]) for actual, expected in zip(mine[:3], whole[:3])]
    per_weight = []
    for name, hidden_dim in HIDDEN_DIM.items():
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
    probe: Probe, problem: dict[str, Any], ep_ranks: Sequence[int], dtype: str, mesh: Mesh | None = None
) -> tuple[Any, ...]:
    """Output and gradients for the rows of some ep ranks, sorted by expert; on one device without a mesh."""
    num_experts, hidden_dim, dim = problem["weights"]["w1"].shape
    experts = probe.platform.public_object("GroupedExperts")(dim, hidden_dim, num_experts)
    probe.session.fill(experts, problem["weights"], dtype, probe.device_type)
    if mesh is not None:
        ExpertTensorParallel().apply(experts, mesh)
    counts = probe.int_tensor(problem["counts"][list(ep_ranks)].sum(axis=0))
    inputs = [
        np.concatenate([problem[what][rank][expert] for expert in range(num_experts) for rank in ep_ranks])
        for what in ("rows", "scores")
    ]
    inputs = [probe.session.tensor(values, dtype, probe.device_type) for values in inputs]

    def function(rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        output = experts(rows, counts, scores)
        return (output * output).sum(), output

    output, of_inputs, of_weights = probe.session.value_and_gradients(function, inputs, experts)
    return output, *of_inputs, of_weights


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Not finite numbers, and numbers in place of nothing, are infinitely wrong."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))
