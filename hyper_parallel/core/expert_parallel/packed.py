"""Hugging Face's experts: gate and up packed in one weight, called with tokens, ids and scores.

``experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]``

    gate_up_proj   [E, 2H, D], or transposed [E, D, 2H]     gate and up one after the other, or in turns
    up_proj        [E, H, D], in place of gate_up_proj where an expert has no gate
    down_proj      [E, D, H], or transposed [E, H, D]
    *_bias         [E, 2H] and [E, D]

Where gate and up follow each other, ``2H`` is laid out as ``(2, H)`` and H is what tp cuts: every rank has the same
part of both. In turns (gate 0, up 0, gate 1, ...) any part of ``2H`` that is 2H / tp long holds pairs.

Shape suffixes: T tokens, K experts per token, R rows, E experts, L experts of one rank, H hidden size, D model size.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.expert_parallel.checks import ExpertShapes, check_plain
from hyper_parallel.core.expert_parallel.exchange import Exchange, Routing
from hyper_parallel.core.expert_parallel.moe import Setting, through_exchange
from hyper_parallel.core.expert_parallel.sharded import Sharded
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.types import Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Cut", "PackedShapes", "ShardedPacked", "packed_shapes", "placements_of"]

FIRST_WEIGHTS = ("gate_up_proj", "up_proj")


@dataclass(frozen=True)
class Cut:
    """How one parameter is laid out.

    Attributes:
        shape: the parameter's own.
        laid_out: the shape in which it is cut; another one where gate and up follow each other.
        hidden: the dim of ``laid_out`` that tp cuts; None for one that every tp rank holds whole.
        pair: the dim of ``laid_out`` that tells gate from up, 2 long; None where no dim does.
    """

    shape: tuple[int, ...]
    laid_out: tuple[int, ...]
    hidden: int | None
    pair: int | None = None


@dataclass(frozen=True)
class PackedShapes(ExpertShapes):
    """Sizes of packed experts before sharding.

    Attributes:
        cuts: by the parameter's name.
        arguments: names of the three inputs of a call.
        swiglu: the experts are ``down(silu(gate) * up)``, without biases; if not, the module's own forward computes.
    """

    cuts: Mapping[str, Cut]
    arguments: tuple[str, ...]
    swiglu: bool


def packed_shapes(platform: Platform, module: Module, style: str) -> PackedShapes | None:
    """Return the sizes of packed experts that are ready to be sharded, or None if ``module`` has no such weights.

    Raises:
        RuntimeError: parameters already sharded.
        ValueError: parameters that are unknown or have other shapes, or a forward with other inputs.
    """
    parameters = platform.parameters(module)
    first = next((name for name in FIRST_WEIGHTS if name in parameters), None)
    if first is None or "down_proj" not in parameters or platform.packed_experts() is None:
        return None
    kind = type(module).__qualname__
    sharded = [name for name, parameter in parameters.items() if platform.is_sharded(parameter)]
    if sharded:
        raise RuntimeError(f"{style}: parameters {sharded} are already laid out over a mesh; apply the style first")
    arguments = tuple(inspect.signature(module.forward).parameters)
    if len(arguments) != 3:
        raise ValueError(
            f"{style}: packed experts are called with hidden states, top-k ids and top-k weights; forward of {kind} "
            f"takes {arguments}"
        )
    num_experts, hidden_dim, dim, cuts = _cuts(module, first, parameters)
    _check_parameters(platform, module, parameters, cuts, f"{style}: {kind}")
    return PackedShapes(num_experts, hidden_dim, dim, cuts, arguments, _is_swiglu(platform, module, cuts))


def _cuts(module: Module, first: str, parameters: Mapping[str, Any]) -> tuple[int, int, int, dict[str, Cut]]:
    """E, H, D, and the cut of every parameter that such a module may have."""
    transposed, concatenated = getattr(module, "is_transposed", False), getattr(module, "is_concatenated", True)
    down = (*parameters["down_proj"].shape, 0, 0, 0)[:3]
    num_experts, dim, hidden = (int(size) for size in ((down[0], down[2], down[1]) if transposed else down))
    double, pair = (2 * hidden, (2, hidden)) if first == "gate_up_proj" else (hidden, (hidden,))
    if not concatenated:
        pair = (double,)
    packed = len(pair) == 2
    if transposed:
        first_cut = Cut(
            (num_experts, dim, double), (num_experts, dim, *pair), 3 if packed else 2, 2 if packed else None
        )
        down_cut = Cut((num_experts, hidden, dim), (num_experts, hidden, dim), 1)
    else:
        first_cut = Cut(
            (num_experts, double, dim), (num_experts, *pair, dim), 2 if packed else 1, 1 if packed else None
        )
        down_cut = Cut((num_experts, dim, hidden), (num_experts, dim, hidden), 2)
    cuts = {first: first_cut, "down_proj": down_cut}
    if getattr(module, "has_bias", False):
        bias = Cut((num_experts, double), (num_experts, *pair), 2 if packed else 1, 1 if packed else None)
        cuts |= {f"{first}_bias": bias, "down_proj_bias": Cut((num_experts, dim), (num_experts, dim), None)}
    return num_experts, hidden, dim, cuts


def _check_parameters(
    platform: Platform, module: Module, parameters: Mapping[str, Any], cuts: Mapping[str, Cut], who: str
) -> None:
    """Parameters that nobody cuts would silently meet parts of others."""
    unknown = [name for name in parameters if name not in cuts]
    for path, child in platform.named_modules(module):
        unknown += [f"{path}.{name}" for name in platform.parameters(child) if path]
    missing = [name for name in cuts if name not in parameters]
    if unknown or missing:
        raise ValueError(f"{who}: packed experts have parameters {list(cuts)}; unknown: {unknown}, missing: {missing}")
    got = {name: tuple(parameters[name].shape) for name in cuts}
    expected = {name: cut.shape for name, cut in cuts.items()}
    if got != expected or 0 in expected["down_proj"]:
        raise ValueError(f"{who}: expected shapes {expected}, after that of down_proj, got {got}")
    dtypes = {name: parameters[name].dtype for name in cuts}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"{who}: expected parameters of one dtype, got {dtypes}")
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{who}: a norm after each expert needs its whole output, which no tp rank has")


def _is_swiglu(platform: Platform, module: Module, cuts: Mapping[str, Cut]) -> bool:
    """Whether a gate is silu's and nothing else, said by the class's own gate function and activation."""
    gate = getattr(type(module), "_apply_gate", None)
    first = cuts.get("gate_up_proj")
    plain = first is not None and first.pair == 1 and len(cuts) == 2
    activation = getattr(module, "act_fn", None)
    is_silu = getattr(activation, "__name__", type(activation).__name__) in ("SiLU", "SiLUActivation", "silu")
    return plain and getattr(gate, "__name__", "") == "_default_apply_gate" and is_silu


def placements_of(shapes: PackedShapes, axes: tuple[str, ...]) -> dict[str, tuple[Placement, ...]]:
    """One placement per mesh axis for every parameter: experts over ep, hidden over tp."""

    def placement(axis: str, cut: Cut) -> Placement:
        if axis == "ep":
            return Shard(0)
        return Replicate() if cut.hidden is None else Shard(cut.hidden)

    return {name: tuple(placement(axis, cut) for axis in axes) for name, cut in shapes.cuts.items()}


@dataclass(frozen=True)
class ShardedPacked(Sharded):
    """Packed experts, called with tokens, ids and scores: all that an exchange asks for.

    Attributes:
        exchange: how the tokens travel to them.
    """

    shapes: PackedShapes
    exchange: Exchange

    def whole(self, mod: Module, local_forward: Callable, *inputs: Any, **keywords: Any) -> Tensor:
        """Tokens [T, D] of this ep coordinate, their experts' ids and scores [T, K] -> [T, D] in the tokens' dtype."""
        platform, (x_TD, selected_TK, scores_TK) = self.platform, self._inputs(inputs, keywords)
        self.check_replicated(tokens=x_TD, ids=selected_TK, scores=scores_TK)
        group = None if self.exchange.sums_over_tp else self.tp_group
        dtype = self.style.reduce_dtype
        setting = Setting(platform, self.exchange, local_forward, group, dtype, tp_axis=self.tp_axis)
        selected_TK = platform.to_int(selected_TK)
        routing = Routing(*platform.sort_by_expert(selected_TK, self.shapes.num_experts))
        x_TD, scores_TK = setting.enter(x_TD), setting.enter(scores_TK, "scores")
        return setting.leave(through_exchange(self.exchange, local_forward, x_TD, scores_TK, selected_TK, routing))

    def _inputs(self, inputs: tuple, keywords: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The three inputs of a call, checked."""
        names = self.shapes.arguments
        given = dict(zip(names, inputs)) | dict(keywords)
        if set(given) != set(names) or len(inputs) + len(keywords) != len(names):
            raise TypeError(f"expected the inputs {names}, got {len(inputs)} and the keywords {sorted(keywords)}")
        for name, value in given.items():
            check_plain(self.platform, name, value, "pass x.to_local()")
        x, ids, scores = (given[name] for name in names)
        if len(x.shape) != 2 or x.shape[1] != self.shapes.dim:
            raise ValueError(f"{names[0]} must have shape [tokens, {self.shapes.dim}], got {tuple(x.shape)}")
        if len(ids.shape) != 2 or ids.shape[0] != x.shape[0] or tuple(scores.shape) != tuple(ids.shape):
            raise ValueError(
                f"{names[1]} and {names[2]} must both have shape [{x.shape[0]}, K], one row per token, got "
                f"{tuple(ids.shape)} and {tuple(scores.shape)}"
            )
        if not self.platform.is_integer(ids) or not self.platform.is_floating(scores):
            raise ValueError(f"{names[1]} must hold integers and {names[2]} scores, got {ids.dtype} and {scores.dtype}")
        return x, ids, scores
