"""A MoE layer on one device, in plain numpy float64 and independent of the library.

Shapes: T tokens, K experts per token, E experts, G groups of experts, R rows (T * K), D model dim, H hidden dim.

    p_TE = softmax or sigmoid of (x @ gate.T)
    chosen: the K largest of p + bias among the experts of a token's best groups
    scores = scale * p[chosen], divided by their sum with `route_norm`
    y = sum over the chosen experts of score * expert(x)   (or expert(score * x)), plus the shared expert
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.harness import oracle


@dataclass(frozen=True)
class Settings:
    """What a layer computes besides its weights; `keywords` are those of the library's constructor."""

    top_k: int = 2
    score_func: str = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    score_position: str = "inside"
    num_shared_experts: int = 0

    @property
    def keywords(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "top_k"}


@dataclass(frozen=True)
class Problem:
    """Full weights under the layer's parameter names, the bias of the choice or None, and for every ep rank its tokens
    and the targets of the loss. All values are float32 numbers, or narrower ones, stored as float64."""

    settings: Settings
    weights: dict[str, np.ndarray]
    bias: np.ndarray | None
    x: list[np.ndarray]
    targets: list[np.ndarray]


@dataclass(frozen=True)
class Routing:
    """The choice `selected_TK`, the scores that go with it, and what their gradient needs."""

    probabilities_TE: np.ndarray
    selected_TK: np.ndarray
    scores_TK: np.ndarray


@dataclass(frozen=True)
class OneDevice:
    """What every ep rank must find for its own tokens, and the gradients of the full weights. The loss of the whole
    problem is the sum of the losses; every tp rank of one ep rank has the same tokens, which count once."""

    outputs: list[np.ndarray]
    losses: list[float]
    x_gradients: list[np.ndarray]
    weight_gradients: dict[str, np.ndarray]
    counts: np.ndarray  # rows of each expert, one line per ep rank
    gate_terms: list[float]  # of each ep rank, the norm of the terms whose differences make up the gate's gradient


def wanted(x_TD, gate_ED, settings: Settings, bias_E=None) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities [T, E], and the values by which experts are chosen."""
    logits_TE = np.asarray(x_TD, np.float64) @ gate_ED.T
    if settings.score_func == "softmax":
        powers_TE = np.exp(logits_TE - logits_TE.max(1, keepdims=True, initial=-np.inf))
        probabilities_TE = powers_TE / powers_TE.sum(1, keepdims=True)
    else:
        probabilities_TE = 1 / (1 + np.exp(-logits_TE))
    return probabilities_TE, probabilities_TE + (0 if bias_E is None else bias_E)


def choose(wanted_TE, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T, K] of each token's experts, best first, and by how much each choice was made [T]: the smallest distance
    between something chosen and something left out, experts and groups of experts alike."""
    selected, margins = [], []
    for values in wanted_TE:
        candidates, margin = set(range(len(values))), np.inf
        if settings.num_expert_groups is not None:
            groups = np.split(np.arange(len(values)), settings.num_expert_groups)
            worth = [sum(sorted(values[group])[-2:]) for group in groups]
            best, margin = _largest(worth, range(len(groups)), settings.num_limited_groups)
            candidates = {expert for group in best for expert in groups[group]}
        experts, own_margin = _largest(values, candidates, settings.top_k)
        selected.append(experts)
        margins.append(min(margin, own_margin))
    return np.array(selected, np.int64).reshape(-1, settings.top_k), np.array(margins)


def route(x_TD, gate_ED, settings: Settings, bias_E=None, selected_TK=None) -> Routing:
    """The experts of each token and their scores; a given `selected_TK` is kept, as gradients require."""
    probabilities_TE, wanted_TE = wanted(x_TD, gate_ED, settings, bias_E)
    if selected_TK is None:
        selected_TK, _ = choose(wanted_TE, settings)
    scores_TK = np.take_along_axis(probabilities_TE, selected_TK, 1)
    if settings.route_norm:
        scores_TK = scores_TK / scores_TK.sum(1, keepdims=True)
    return Routing(probabilities_TE, selected_TK, settings.route_scale * scores_TK)


def layer(x_TD, weights: dict, routing: Routing, settings: Settings) -> np.ndarray:
    """The output tokens [T, D] for a routing."""
    y_TD = np.zeros(np.shape(x_TD))
    tokens_R, scores_R, counts_E = _rows(routing)
    inputs = _experts_inputs(x_TD, weights, settings, tokens_R, scores_R, counts_E)
    np.add.at(y_TD, tokens_R, oracle.grouped_experts(*inputs))
    if settings.num_shared_experts:
        y_TD += oracle.grouped_experts(x_TD, [len(x_TD)], *_shared(weights))
    return y_TD


def layer_gradients(grad_output_TD, x_TD, weights: dict, routing: Routing, settings: Settings) -> dict[str, np.ndarray]:
    """The gradients of sum(grad_output * y) for "x", "scores" and every weight, the choice of experts held fixed."""
    x_TD = np.asarray(x_TD, np.float64)
    tokens_R, scores_R, counts_E = _rows(routing)
    inputs = _experts_inputs(x_TD, weights, settings, tokens_R, scores_R, counts_E)
    of_experts = oracle.grouped_experts_gradients(grad_output_TD[tokens_R], *inputs)
    if settings.score_position == "before":
        of_rows_RD = of_experts.x * scores_R[:, None]
        of_scores_R = (of_experts.x * x_TD[tokens_R]).sum(1)
    else:
        of_rows_RD, of_scores_R = of_experts.x, of_experts.scores
    of_scores_TK = _unsorted(of_scores_R, routing)
    of_logits_TE = _logits_gradient(of_scores_TK, routing, settings)
    of_x_TD = of_logits_TE @ weights["router.gate.weight"]
    np.add.at(of_x_TD, tokens_R, of_rows_RD)
    result = {"router.gate.weight": of_logits_TE.T @ x_TD}
    result.update({f"experts.{name}": getattr(of_experts, name) for name in ("w1", "w2", "w3")})
    if settings.num_shared_experts:
        of_shared = oracle.grouped_experts_gradients(grad_output_TD, x_TD, [len(x_TD)], *_shared(weights))
        of_x_TD = of_x_TD + of_shared.x
        result.update({f"shared_experts.{name}.weight": getattr(of_shared, name)[0] for name in ("w1", "w2", "w3")})
    return {"x": of_x_TD, "scores": of_scores_TK, **result}


def one_device(problem: Problem, selected: Sequence[np.ndarray] | None = None) -> OneDevice:
    """The tokens of all ep ranks through the full weights, and `oracle.loss` over them.

    `selected`, one [T, K] per ep rank, holds the choice of experts fixed.
    """
    gate, settings, num_experts = problem.weights["router.gate.weight"], problem.settings, problem_size(problem)
    outputs, of_x, totals, counts, gate_terms = [], [], {}, [], []
    for rank, (x, target) in enumerate(zip(problem.x, problem.targets)):
        routing = route(x, gate, settings, problem.bias, None if selected is None else selected[rank])
        outputs.append(layer(x, problem.weights, routing, settings))
        slope = oracle.loss_gradient(outputs[-1], target)
        gradients = layer_gradients(slope, x, problem.weights, routing, settings)
        of_x.append(gradients.pop("x"))
        # A score's change is felt through every probability it was divided by, with either sign: see _logits_gradient.
        of_tokens_T = np.abs(routing.scores_TK * gradients.pop("scores")).sum(1)
        gate_terms.append(float(np.linalg.norm(of_tokens_T[:, None] * x)))
        totals = {name: totals.get(name, 0) + gradient for name, gradient in gradients.items()}
        counts.append(np.bincount(routing.selected_TK.ravel(), minlength=num_experts))
    losses = [oracle.loss(y, target) for y, target in zip(outputs, problem.targets)]
    return OneDevice(outputs, losses, of_x, totals, np.array(counts), gate_terms)


def problem_size(problem: Problem) -> int:
    """The number of experts."""
    return len(problem.weights["router.gate.weight"])


def make_problem(
    ep: int,
    settings: Settings,
    num_experts: int = 8,
    dim: int = 6,
    hidden: int = 8,
    tokens_per_ep_rank: int | Sequence[int] = 12,
    with_bias: bool = True,
    bias: Sequence[float] | None = None,
    margin: float = 1e-3,
    mantissa_bits: int = 23,
    seed: int = 0,
) -> Problem:
    """A problem whose outputs and gradients per token are of order 1, with other tokens on every ep rank.

    The routing is uneven, because all tokens share a direction; a `bias` in place of the drawn one can force it. No
    choice is closer than `margin`: frameworks that round differently must choose the same experts. With `mantissa_bits`
    of 7 all values are bfloat16 numbers.
    """
    random = np.random.default_rng(seed)

    def rounded(values: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.round(np.ldexp(mantissa, mantissa_bits + 1)), exponent - mantissa_bits - 1)

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return rounded(size * random.standard_normal(shape))

    def swiglu(*leading: int, width: int) -> dict[str, np.ndarray]:
        return {
            "w1": normal(*leading, width, dim, size=dim**-0.5),
            "w2": normal(*leading, dim, width, size=width**-0.5),
            "w3": normal(*leading, width, dim, size=dim**-0.5),
        }

    gate = normal(num_experts, dim, size=dim**-0.5)
    weights = {"router.gate.weight": gate}
    weights.update({f"experts.{name}": weight for name, weight in swiglu(num_experts, width=hidden).items()})
    if settings.num_shared_experts:
        shared = swiglu(width=hidden * settings.num_shared_experts)
        weights.update({f"shared_experts.{name}.weight": weight for name, weight in shared.items()})
    if bias is not None:
        bias = rounded(np.asarray(bias, np.float64))
    elif with_bias:
        bias = normal(num_experts, size=0.2)
    direction = normal(dim, size=0.7)

    def tokens(count: int) -> np.ndarray:
        kept = np.zeros((0, dim))
        while len(kept) < count:
            drawn = rounded(normal(2 * count, dim) + direction)
            _, margins = choose(wanted(drawn, gate, settings, bias)[1], settings)
            kept = np.concatenate([kept, drawn[margins > margin]])
        return kept[:count]

    x = [tokens(int(count)) for count in np.broadcast_to(tokens_per_ep_rank, ep)]
    return Problem(settings, weights, bias, x, [normal(len(own), dim) for own in x])


def _largest(values, candidates, number) -> tuple[list[int], float]:
    """The `number` candidates of largest value, largest first, and the distance to the best one left out."""
    order = sorted(candidates, key=lambda index: -values[index])
    left_out = [values[index] for index in order[number:]]
    return order[:number], values[order[number - 1]] - max(left_out) if left_out else np.inf


def _rows(routing: Routing):
    """Token and score of every row in order of experts, and the rows of each expert."""
    order_R = np.argsort(routing.selected_TK, axis=None, kind="stable")
    tokens_R = order_R // routing.selected_TK.shape[1]
    counts_E = np.bincount(routing.selected_TK.ravel(), minlength=routing.probabilities_TE.shape[1])
    return tokens_R, routing.scores_TK.ravel()[order_R], counts_E


def _unsorted(values_R, routing: Routing) -> np.ndarray:
    """Values of the rows in order of experts, as [T, K]."""
    values_TK = np.zeros(routing.selected_TK.size)
    values_TK[np.argsort(routing.selected_TK, axis=None, kind="stable")] = values_R
    return values_TK.reshape(routing.selected_TK.shape)


def _experts_inputs(x_TD, weights, settings, tokens_R, scores_R, counts_E):
    rows_RD, experts = (
        np.asarray(x_TD, np.float64)[tokens_R],
        [weights[f"experts.{name}"] for name in ("w1", "w2", "w3")],
    )
    if settings.score_position == "before":
        return rows_RD * scores_R[:, None], counts_E, *experts, None
    return rows_RD, counts_E, *experts, scores_R


def _shared(weights):
    """The shared expert's weights, as those of one expert."""
    return [weights[f"shared_experts.{name}.weight"][None] for name in ("w1", "w2", "w3")]


def _logits_gradient(of_scores_TK, routing: Routing, settings: Settings) -> np.ndarray:
    of_scores_TK = settings.route_scale * of_scores_TK
    p_TE, index_TK = routing.probabilities_TE, routing.selected_TK
    if settings.route_norm:  # s_i = p_i / sum(p):  ds_i / dp_j = (1[i = j] - s_i) / sum(p)
        picked_TK = np.take_along_axis(p_TE, index_TK, 1)
        sums_T1 = picked_TK.sum(1, keepdims=True)
        of_scores_TK = (of_scores_TK - (of_scores_TK * picked_TK / sums_T1).sum(1, keepdims=True)) / sums_T1
    of_p_TE = np.zeros(p_TE.shape)
    np.put_along_axis(of_p_TE, index_TK, of_scores_TK, 1)
    if settings.score_func == "softmax":
        return p_TE * (of_p_TE - (of_p_TE * p_TE).sum(1, keepdims=True))
    return p_TE * (1 - p_TE) * of_p_TE
