"""Grouped SwiGLU experts on one device, in plain numpy float64 and independent of the library.

Shapes: R rows (tokens sent to an expert, sorted by expert id), E experts, D model dim, H hidden dim.
    x_RD, scores_R, counts_E (rows of each expert), w1_EHD, w2_EDH, w3_EHD
    y = scores * w2(silu(w1 x) * (w3 x))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExpertGradients:
    """Gradients of a scalar for all inputs of `grouped_experts`; `scores` is None where there were none."""

    x: np.ndarray
    scores: np.ndarray | None
    w1: np.ndarray
    w2: np.ndarray
    w3: np.ndarray


@dataclass(frozen=True)
class Problem:
    """Full weights, and for every ep rank its rows, their scores, the targets of the loss, and its counts (one row of
    `counts`). All values are float32 numbers stored as float64: a float32 framework starts from the same ones."""

    w1: np.ndarray
    w2: np.ndarray
    w3: np.ndarray
    x: list[np.ndarray]
    scores: list[np.ndarray]
    targets: list[np.ndarray]
    counts: np.ndarray


@dataclass(frozen=True)
class OneDevice:
    """What every ep rank must find for its own rows, and the gradients of the full weights. The loss of the whole
    problem is the sum of the losses; every tp rank of one ep rank has the same rows, which count once."""

    outputs: list[np.ndarray]
    losses: list[float]
    x_gradients: list[np.ndarray]
    score_gradients: list[np.ndarray] | None
    w1_gradient: np.ndarray
    w2_gradient: np.ndarray
    w3_gradient: np.ndarray


def grouped_experts(x_RD, counts_E, w1_EHD, w2_EDH, w3_EHD, scores_R=None) -> np.ndarray:
    """The output rows y_RD."""
    _check_counts(x_RD, counts_E)
    y_RD = np.zeros(np.shape(x_RD))
    for expert, rows in enumerate(_slices(counts_E)):
        x = np.asarray(x_RD[rows], np.float64)
        y_RD[rows] = (_silu(x @ w1_EHD[expert].T) * (x @ w3_EHD[expert].T)) @ w2_EDH[expert].T
    return y_RD if scores_R is None else y_RD * np.asarray(scores_R, np.float64)[:, None]


def grouped_experts_gradients(grad_output_RD, x_RD, counts_E, w1_EHD, w2_EDH, w3_EHD, scores_R=None) -> ExpertGradients:
    """The gradients of sum(grad_output * y)."""
    _check_counts(x_RD, counts_E)
    x_grad, w1_grad, w2_grad, w3_grad = (np.zeros(np.shape(value)) for value in (x_RD, w1_EHD, w2_EDH, w3_EHD))
    scores = np.ones(len(x_RD)) if scores_R is None else np.asarray(scores_R, np.float64)
    scores_grad = np.zeros(len(x_RD))
    for expert, rows in enumerate(_slices(counts_E)):
        x, grad = np.asarray(x_RD[rows], np.float64), np.asarray(grad_output_RD[rows], np.float64)
        w1, w2, w3 = w1_EHD[expert], w2_EDH[expert], w3_EHD[expert]
        gate, up = x @ w1.T, x @ w3.T
        hidden = _silu(gate) * up
        scores_grad[rows] = (grad * (hidden @ w2.T)).sum(axis=1)
        grad = grad * scores[rows, None]
        hidden_grad = grad @ w2
        gate_grad, up_grad = hidden_grad * up * _silu_slope(gate), hidden_grad * _silu(gate)
        x_grad[rows] = gate_grad @ w1 + up_grad @ w3
        w1_grad[expert], w2_grad[expert], w3_grad[expert] = gate_grad.T @ x, grad.T @ hidden, up_grad.T @ x
    return ExpertGradients(x_grad, None if scores_R is None else scores_grad, w1_grad, w2_grad, w3_grad)


def loss(output_RD, target_RD) -> float:
    """sum((output + target)^2) / 2: not linear in the output, so a wrong output spoils the gradients too, and without a
    cancellation that would magnify the rounding of float32 (as that of 1 - tanh^2 does)."""
    return float(((output_RD + target_RD) ** 2).sum()) / 2


def loss_gradient(output_RD, target_RD) -> np.ndarray:
    """The gradient of `loss` for the output."""
    return output_RD + target_RD


def make_problem(
    ep: int,
    num_experts: int,
    dim: int,
    hidden: int,
    rows_per_ep_rank: int | Sequence[int] = 16,
    counts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Problem:
    """A problem whose outputs and gradients per row are of order 1, with other rows on every ep rank.

    The routing is uneven: most rows of ep rank r go to experts near r, few or none to the others. `counts`, one list of
    `num_experts` per ep rank, sets it by hand.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    if counts is None:
        shares = 0.5 ** np.arange(1, num_experts + 1)
        counts = [
            random.multinomial(rows, np.roll(shares / shares.sum(), rank))
            for rank, rows in enumerate(np.broadcast_to(rows_per_ep_rank, ep))
        ]
    counts = np.asarray(counts, np.int64)
    if counts.shape != (ep, num_experts):
        raise ValueError(f"counts has shape {counts.shape}, expected {(ep, num_experts)}")
    rows = counts.sum(axis=1)
    return Problem(
        w1=_float32_values(normal(num_experts, hidden, dim) / np.sqrt(dim)),
        w2=_float32_values(2 * normal(num_experts, dim, hidden) / np.sqrt(hidden)),
        w3=_float32_values(normal(num_experts, hidden, dim) / np.sqrt(dim)),
        x=[_float32_values(normal(count, dim)) for count in rows],
        scores=[_float32_values(random.uniform(0.25, 1.0, count)) for count in rows],
        targets=[_float32_values(normal(count, dim)) for count in rows],
        counts=counts,
    )


def one_device(problem: Problem, with_scores: bool = True) -> OneDevice:
    """All rows of all ep ranks through the full weights, and `loss` over them."""
    ranks = np.repeat(np.arange(len(problem.counts)), problem.counts.sum(axis=1))
    experts = np.concatenate([np.repeat(np.arange(counts.size), counts) for counts in problem.counts])
    order = np.argsort(experts, kind="stable")
    x, targets = np.concatenate(problem.x)[order], np.concatenate(problem.targets)[order]
    scores = np.concatenate(problem.scores)[order] if with_scores else None
    inputs = (x, problem.counts.sum(axis=0), problem.w1, problem.w2, problem.w3, scores)
    output = grouped_experts(*inputs)
    gradients = grouped_experts_gradients(loss_gradient(output, targets), *inputs)

    def per_rank(rows: np.ndarray) -> list[np.ndarray]:
        return [rows[ranks[order] == rank] for rank in range(len(problem.counts))]  # Still sorted by expert.

    outputs = per_rank(output)
    return OneDevice(
        outputs,
        [loss(own, target) for own, target in zip(outputs, problem.targets)],
        per_rank(gradients.x),
        per_rank(gradients.scores) if with_scores else None,
        gradients.w1,
        gradients.w2,
        gradients.w3,
    )


def relative_error(actual, expected) -> float:
    """norm(actual - expected) / norm(expected). Unlike an absolute tolerance it sees zeros in place of small values."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shape {actual.shape} differs from the expected {expected.shape}")
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise ValueError("a value is not finite")
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))


def _check_counts(x_RD, counts_E) -> None:
    if np.sum(counts_E) != len(x_RD):
        raise ValueError(f"counts sum to {np.sum(counts_E)}, but there are {len(x_RD)} rows")


def _slices(counts_E) -> list[slice]:
    ends = np.cumsum(counts_E)
    return [slice(end - count, end) for end, count in zip(ends, counts_E)]


def _silu(value: np.ndarray) -> np.ndarray:
    return value / (1 + np.exp(-value))


def _silu_slope(value: np.ndarray) -> np.ndarray:
    sigmoid = 1 / (1 + np.exp(-value))
    return sigmoid * (1 + value * (1 - sigmoid))


def _float32_values(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).astype(np.float64)
