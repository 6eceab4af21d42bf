"""Experts and MoE layers of random sizes, routings and settings, drawn from seeds, against one device in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import hyper_parallel as hp
from tests.distributed import moe_cases
from tests.harness import moe_oracle, oracle
from tests.harness.setting import coordinates, local_part, make_experts, mesh_for, sabotage

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
MESHES_OF_STYLES = {
    "ExpertParallel": [(1, 1), (2, 1), (4, 1)],
    "TensorParallel": [(1, 1), (1, 2), (1, 4)],
    "ExpertTensorParallel": MESHES,
    "DedupExpertTensorParallel": MESHES,
    "SplitExpertTensorParallel": MESHES,
}
SPREADS = ("uniform", "zipf", "half of the experts empty", "all to one expert")
TOKENS = ("some", "one", "ranks without", "none")
TINY = np.finfo(np.float64).tiny
RATE = 0.125  # of the bias; a power of two, so that the update is rounded once


@dataclass(frozen=True)
class Draw:
    """One case. `num_tokens` are those of each ep rank (of bare experts: rows), `settings` those of a MoE layer, or
    None for bare experts; `shape` is (B, S) of tokens that come as [B, S, D], or None for [T, D]."""

    seed: int
    style: str
    ep: int
    tp: int
    dtype: str
    num_experts: int
    dim: int
    hidden: int
    spread: str
    tokens: str
    num_tokens: tuple[int, ...]
    with_scores: bool = False
    settings: moe_oracle.Settings | None = None
    with_bias: bool = False
    shared: str = "none"
    shape: tuple[int, int] | None = None


def draw(seed: int) -> Draw:
    """The case of a seed, the same on every rank and framework."""
    random = np.random.default_rng([7, seed])

    def pick(values):
        return values[random.integers(len(values))]

    style = pick(list(MESHES_OF_STYLES))
    ep, tp = pick(MESHES_OF_STYLES[style])
    tokens = random.choice(TOKENS, p=(0.6, 0.15, 0.2, 0.05))
    limit = 33 if random.random() < 0.15 else 13
    num_tokens = {"some": random.integers(1, limit, ep), "one": [1] * ep, "none": [0] * ep}.get(tokens)
    if num_tokens is None:
        num_tokens = random.integers(1, limit, ep) * (random.random(ep) < 0.5)
    dtype = pick(["float64", "float32"])
    # One number may be the small rest of two, with float32's rounding of both; several hardly are so together.
    smallest = 1 if dtype == "float64" else 4
    drawn = Draw(
        seed=seed,
        style=style,
        ep=ep,
        tp=tp,
        dtype=dtype,
        num_experts=ep * int(random.integers(1, 5)),
        dim=int(random.integers(smallest, 12)),
        hidden=tp * int(random.integers(smallest, 8)),
        spread=pick(SPREADS),
        tokens=str(tokens),
        num_tokens=tuple(int(number) for number in num_tokens),
        with_scores=bool(random.random() < 0.6),
    )
    return drawn if random.random() < 0.4 else _draw_layer(drawn, random, pick)


def _draw_layer(drawn: Draw, random, pick) -> Draw:
    size = pick([size for size in range(1, drawn.num_experts + 1) if drawn.num_experts % size == 0])
    groups = {}
    if size > 1 and random.random() < 0.6:
        number = drawn.num_experts // size
        groups = {"num_expert_groups": number, "num_limited_groups": int(random.integers(1, number + 1))}
    within_reach = groups["num_limited_groups"] * size if groups else drawn.num_experts
    shared = pick(["none", "replicated", "sharded"])
    batch, sequence = int(random.integers(1, 4)), int(random.integers(1, 6))
    return replace(
        drawn,
        with_scores=True,
        settings=moe_oracle.Settings(
            top_k=int(random.integers(1, min(5, within_reach) + 1)),
            score_func=pick(["softmax", "sigmoid"]),
            route_norm=bool(random.random() < 0.5),
            route_scale=pick([1.0, 2.5]),
            score_position=pick(["before", "inside", "after"]),
            num_shared_experts=0 if shared == "none" else int(random.integers(1, 3)),
            **groups,
        ),
        with_bias=bool(drawn.spread != "uniform" or random.random() < 0.5),
        shared=shared,
        **(
            {"shape": (batch, sequence), "num_tokens": (batch * sequence,) * drawn.ep} if drawn.tokens == "some" else {}
        ),
    )


def errors(context, seed, breaks=()):
    """Relative errors of this rank's values against one device."""
    drawn = draw(seed)
    with sabotage(context, *(set(breaks) - {"shift_experts"})):
        return (_of_experts if drawn.settings is None else _of_layer)(context, drawn, "shift_experts" in breaks)


def _of_experts(context, drawn, shifted):
    shares = np.exp(_preferences(drawn))
    random = np.random.default_rng(drawn.seed)
    counts = [random.multinomial(rows, shares / shares.sum()) for rows in drawn.num_tokens]
    problem = oracle.make_problem(drawn.ep, *_sizes(drawn), counts=counts, seed=drawn.seed)
    style = getattr(hp, drawn.style)()
    experts = make_experts(context, _shifted(problem) if shifted else problem, drawn.dtype)
    style.apply(experts, mesh_for(context, style, drawn.ep, drawn.tp))

    ep_rank, tp_rank = coordinates(context, drawn.ep, drawn.tp)
    counts = context.framework.int_tensor(problem.counts[ep_rank])
    inputs = [problem.x[ep_rank], problem.scores[ep_rank]][: 1 + drawn.with_scores]
    evaluation = _evaluate(context, drawn, experts, inputs, problem.targets[ep_rank], counts)
    expected = oracle.one_device(problem, drawn.with_scores)
    found = {
        "output": (evaluation.output, expected.outputs[ep_rank]),
        "x": (evaluation.input_gradients[0], expected.x_gradients[ep_rank]),
    }
    if drawn.with_scores:
        found["scores"] = evaluation.input_gradients[1], expected.score_gradients[ep_rank]
    for name in ("w1", "w2", "w3"):
        mine = local_part(getattr(expected, f"{name}_gradient"), name, drawn.ep, drawn.tp, ep_rank, tp_rank)
        found[name] = evaluation.parameter_gradients[name], mine
    return {name: oracle.relative_error(*pair) for name, pair in found.items()}


def _of_layer(context, drawn, shifted):
    problem = moe_oracle.make_problem(
        drawn.ep,
        drawn.settings,
        *_sizes(drawn),
        tokens_per_ep_rank=drawn.num_tokens,
        with_bias=False,
        bias=_preferences(drawn) if drawn.with_bias else None,
        seed=drawn.seed,
    )
    moe = moe_cases.parallel_moe(
        context,
        _shifted_layer(problem) if shifted else problem,
        drawn.ep,
        drawn.tp,
        shared=drawn.shared,
        style=drawn.style,
        dtype=drawn.dtype,
        **({"bias_update_rate": RATE} if drawn.with_bias else {}),
    )
    ep_rank, tp_rank = coordinates(context, drawn.ep, drawn.tp)
    evaluation = _evaluate(context, drawn, moe, [problem.x[ep_rank]], problem.targets[ep_rank])
    expected = moe_oracle.one_device(problem)
    mine = moe_oracle.one_device(_part_of(problem, ep_rank))
    found = {
        "output": (evaluation.output.reshape(-1, drawn.dim), mine.outputs[0]),
        "x": (evaluation.input_gradients[0].reshape(-1, drawn.dim), mine.x_gradients[0]),
        "load": (moe_cases.load(context, moe), mine.counts[0]),
    }
    for name, of_mine in mine.weight_gradients.items():
        gradient = evaluation.parameter_gradients[name]
        if name.startswith("experts."):
            whole = expected.weight_gradients[name]
            found[name] = gradient, local_part(whole, name[-2:], drawn.ep, drawn.tp, ep_rank, tp_rank)
        elif name.startswith("shared_experts.") and drawn.shared == "sharded":
            found[name] = gradient, np.split(of_mine, drawn.tp, axis=1 if ".w2." in name else 0)[tp_rank]
        else:
            found[name] = gradient, of_mine
    if drawn.with_bias:
        moe.update_expert_bias(mesh_for(context, hp.ExpertTensorParallel(), drawn.ep, drawn.tp)["ep"])
        load = expected.counts.sum(0)
        after = (problem.bias + RATE * np.sign(load.mean() - load)).astype(np.float32)
        found["bias"] = context.framework.array(moe.expert_bias), after
    result = {name: oracle.relative_error(*pair) for name, pair in found.items()}
    # Where the terms of the gate's gradient cancel, rounding is small beside them and not beside what is left: with one
    # expert per token and route_norm, a score is 1 whatever the gate says, and nothing is left.
    rest = np.linalg.norm(mine.weight_gradients["router.gate.weight"])
    result["router.gate.weight"] *= min(1.0, max(rest, TINY) / max(mine.gate_terms[0], TINY))
    return result


def _evaluate(context, drawn, module, inputs, target, *counts):
    """The module on a rank's rows or tokens, in the dtype of the case."""
    adapter = context.framework
    if drawn.shape:
        inputs, target = [value.reshape(*drawn.shape, drawn.dim) for value in inputs], target.reshape(*drawn.shape, -1)
    target = adapter.tensor(target, drawn.dtype)

    def function(x, *scores):
        y = module(x, *counts, *scores)
        return adapter.loss(y, target), y

    return adapter.value_and_gradients(function, [adapter.tensor(value, drawn.dtype) for value in inputs], module)


def _sizes(drawn):
    return drawn.num_experts, drawn.dim, drawn.hidden


def _preferences(drawn):
    """How much each expert is wanted [E]: logarithms of shares for bare experts, a bias of the choice for a layer."""
    random = np.random.default_rng([drawn.seed, 1])
    order = random.permutation(drawn.num_experts)
    return {
        "uniform": 0.05 * order / drawn.num_experts,
        "zipf": -1.5 * np.log1p(order),
        "half of the experts empty": np.where(2 * order < drawn.num_experts, 0.0, -100.0),
        "all to one expert": np.where(order == 0, 0.0, -100.0),
    }[drawn.spread]


def _part_of(problem, ep_rank):
    """The layer on the tokens of one ep rank."""
    return replace(problem, x=[problem.x[ep_rank]], targets=[problem.targets[ep_rank]])


def _shifted(problem):
    """Every expert in the place of its neighbour."""
    return replace(problem, **{name: np.roll(getattr(problem, name), 1, axis=0) for name in ("w1", "w2", "w3")})


def _shifted_layer(problem):
    shifted = {
        name: np.roll(weight, 1, axis=0) if name.startswith("experts.") else weight
        for name, weight in problem.weights.items()
    }
    return replace(problem, weights=shifted)
