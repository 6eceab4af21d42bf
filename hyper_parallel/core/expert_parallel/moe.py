"""The MoE layer, written once for both frameworks and for all ways in which tokens travel.

Shape suffixes: T tokens, K experts per token, R rows of this rank's experts, D model size.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from hyper_parallel.core.expert_parallel.checks import check_output, check_tokens
from hyper_parallel.core.expert_parallel.exchange import Exchange, Places, Routing, RowsExchange
from hyper_parallel.core.expert_parallel.sharded import Caller, Kept, ShardedExperts
from hyper_parallel.core.expert_parallel.tokens import COMPLETE_OVER, TokenLayout, Tokens
from hyper_parallel.core.types import Group, Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Setting", "mixture_of_experts", "through_exchange", "through_experts"]

# (rows_RD, counts_L, scores_R or None) -> rows: the experts of this rank on local rows.
LocalExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def mixture_of_experts(platform: Platform, moe: Any, x: Tensor) -> Tensor:
    """A MoE layer: route, run the chosen experts, sum their scored outputs, add the shared expert.

    Args:
        moe: has ``router``, ``experts``, ``shared_experts`` (or None), ``shared_gate`` (or None), ``score_position``,
            ``expert_bias`` (or None) and ``tokens_per_expert``.
        x: [..., D]. With tensor-parallel experts all tp ranks hold the same x.

    Returns:
        The shape and dtype of x.
    """
    if moe.token_layout is not None:
        return platform.eagerly(_cut_over_tp, platform, moe, moe.token_layout, x)
    check_tokens(platform, moe, x)
    x_TD = x if len(x.shape) == 2 else x.reshape((_product(x.shape[:-1]), x.shape[-1]))
    scores_TK, selected_TK = moe.router(x_TD, moe.expert_bias)
    # How many rows go where is data: a compiler that traced this would trace again for every new routing.
    has_sharded = moe.shared_experts is not None and platform.sharded(moe.shared_experts) is not None
    parts = ["experts"]
    if has_sharded:
        parts += ["shared_experts"] if _gate_of(moe) is None else ["shared_experts", "shared_gate"]
    y_TD = platform.as_operator(moe, "after_routing", parts, x_TD, scores_TK, selected_TK)
    if moe.shared_experts is not None and not has_sharded:
        y_TD = y_TD + _gated(platform, moe.shared_experts(x_TD), _gate_values(platform, moe, x_TD))
    return y_TD if len(x.shape) == 2 else y_TD.reshape(tuple(x.shape))


def through_experts(platform: Platform, moe: Any, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor) -> Tensor:
    """What follows the routing, whatever way the tokens travel, and a sharded shared expert: [T, D]."""
    with _naming_errors(platform, moe):
        setting, shared_experts = Setting.of(platform, moe), moe.shared_experts
        inputs_TD = setting.enter(x_TD)
        y_TD = _routed(platform, moe, setting, inputs_TD, scores_TK, selected_TK)
        has_sharded = shared_experts is not None and platform.sharded(shared_experts) is not None
        gate_T = _gate_values(platform, moe, x_TD) if has_sharded else None
        if setting.holds_shared_experts:
            entered_T = None if gate_T is None else setting.enter(gate_T, "shared gate")
            y_TD = y_TD + _gated(platform, shared_experts(inputs_TD, Caller.MOE_LAYER), entered_T)
        y_TD = setting.leave(y_TD)
        if has_sharded and not setting.holds_shared_experts:  # it has a sum of its own
            y_TD = y_TD + _gated(platform, shared_experts(x_TD), gate_T)
        return y_TD


def _cut_over_tp(platform: Platform, moe: Any, layout: TokenLayout, x: Any) -> Any:
    """The layer on tokens that are cut over tp, or returned so: the layer's layouts say which."""
    with _naming_errors(platform, moe):
        setting, shared_experts = Setting.of(platform, moe), moe.shared_experts
        experts_over_tp = _lies_on(layout, platform.sharded(moe.experts), must=True)
        holds_shared = shared_experts is not None and _lies_on(layout, platform.sharded(shared_experts))
        sums = experts_over_tp and not setting.exchange.sums_over_tp
        dtype = setting.reduce_dtype
        tokens = layout.enter(moe, x, sums or holds_shared, dtype)
        _note_complete_gradients(platform, moe, layout)

        scores_TK, selected_TK = moe.router(tokens.complete_TD, moe.expert_bias)
        inputs_TD = tokens.terms_TD if sums else tokens.complete_TD
        takes_share = tokens.own_SD is not None and setting.exchange.takes_shares and layout.wanted.is_shard()
        y_TD = _routed(platform, moe, setting, inputs_TD, scores_TK, selected_TK, tokens if takes_share else None)
        terms, complete, own = (y_TD if kind else None for kind in (sums, not sums and not takes_share, takes_share))
        gate_T = None if shared_experts is None else _gate_values(platform, moe, tokens.complete_TD)
        if holds_shared:
            if gate_T is not None:
                name = f"moe: sum of the shared gate's gradient over {layout.axis}"
                gate_T = platform.copy_to_group(gate_T, layout.mesh.get_group(), name)
            y_TD = _gated(platform, shared_experts(tokens.terms_TD, Caller.MOE_LAYER), gate_T)
            terms = y_TD if terms is None else terms + y_TD
        elif shared_experts is not None:
            y_TD = _gated(platform, shared_experts(tokens.complete_TD), gate_T)
            complete = y_TD if complete is None else complete + y_TD
        return layout.leave(tokens, terms, complete, own, dtype)


def _lies_on(layout: TokenLayout, sharded: Any, must: bool = False) -> bool:
    """Whether a module is cut over several ranks, those that the tokens are cut over.

    Raises:
        ValueError: it ``must``, and is cut over others.
    """
    mesh = getattr(sharded, "tp_mesh", None)
    if mesh is None or mesh.size() == 1:
        return False
    if mesh.mesh.tolist() == layout.ranks:
        return True
    if must:
        raise ValueError(
            f"{sharded.label} cuts the experts over ranks {mesh.mesh.tolist()}, but MoESequenceParallel the tokens "
            f"over ranks {layout.ranks}; apply both on slices of one mesh, with the same tp axis"
        )
    return False


def _note_complete_gradients(platform: Platform, moe: Any, layout: TokenLayout) -> None:
    """Parameters that ranks of different tokens use alike: sums over these ranks would count every token again.

    Noted in each call, for copies of a module have parameters of their own.
    """
    for _, module in platform.named_modules(moe):
        for parameter in platform.parameters(module).values():
            if parameter is not None:
                setattr(parameter, COMPLETE_OVER, tuple(layout.ranks))


def _naming_errors(platform: Platform, moe: Any) -> AbstractContextManager:
    sharded = platform.sharded(moe.experts)
    return sharded.naming_errors() if isinstance(sharded, ShardedExperts) else nullcontext()


def _routed(
    platform: Platform,
    moe: Any,
    setting: "Setting",
    inputs_TD: Tensor,
    scores_TK: Tensor,
    selected_TK: Tensor,
    shares: Tokens | None = None,
) -> Tensor:
    """Outputs of each token's experts, summed: terms of a sum over tp, if the setting has one. With ``shares`` only the
    tokens of this tp rank are sent and come back; scores and choices are those of all."""
    sharded = platform.sharded(moe.experts)
    if isinstance(sharded, ShardedExperts):
        sharded.check_replicated(tokens=inputs_TD, scores=scores_TK)
    routing = Routing(*platform.sort_by_expert(selected_TK, moe.router.num_experts))
    learns = _router_learns(platform, moe.router)
    if learns:
        scores_TK = platform.count_in_backward(scores_TK, moe.tokens_per_expert, routing.counts_E)

    scores_TK = setting.enter(scores_TK, "scores")
    experts = partial(_scored_experts, platform, moe, setting.call)
    if shares is None:
        y_TD = through_exchange(setting.exchange, experts, inputs_TD, scores_TK, selected_TK, routing)
    else:
        inputs, trip = setting.exchange.dispatch_share(shares.own_SD, shares.splits, scores_TK, selected_TK)
        y_TD = setting.exchange.combine_share(experts(*inputs), trip)
    if not learns:  # No gradient may come to the scores; one comes here if anything behind is trained.
        y_TD = platform.count_in_backward(y_TD, moe.tokens_per_expert, routing.counts_E)
    return y_TD


def _gate_of(moe: Any) -> Any:
    return getattr(moe, "shared_gate", None)  # layers of other makers have none


def _gate_values(platform: Platform, moe: Any, x_TD: Tensor) -> Tensor | None:
    """What each token's shared output is multiplied by: [T], or None for a layer without a gate."""
    gate = _gate_of(moe)
    return None if gate is None else platform.probabilities(gate(x_TD), "sigmoid").reshape((x_TD.shape[0],))


def _gated(platform: Platform, y_TD: Tensor, gate_T: Tensor | None) -> Tensor:
    return y_TD if gate_T is None else platform.scale_rows(y_TD, gate_T)


def through_exchange(
    exchange: Exchange, experts: LocalExperts, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor, routing: Routing
) -> Tensor:
    """Tokens to their experts, through them, and back: [T, D], still terms where the exchange does not sum over tp."""
    arriving = exchange.start(routing.counts_E, x_TD, scores_TK)
    inputs, trip = exchange.dispatch(x_TD, scores_TK, selected_TK, routing, arriving)
    return exchange.combine(experts(*inputs), trip)


def _router_learns(platform: Platform, router: Module) -> bool:
    """Whether a gradient is sure to come to the scores: some parameter of the router is trained."""
    modules = (module for _, module in platform.named_modules(router))
    return any(p.requires_grad for module in modules for p in platform.parameters(module).values() if p is not None)


def _scored_experts(
    platform: Platform, moe: Any, experts: LocalExperts, rows_RD: Tensor, counts_L: Tensor, scores_R: Tensor
) -> Tensor:
    """Call the experts with the scores where the layer wants them."""
    if moe.score_position == "inside":
        return experts(rows_RD, counts_L, scores_R)
    if moe.score_position == "before":
        return experts(platform.scale_rows(rows_RD, scores_R), counts_L, None)
    return platform.scale_rows(experts(rows_RD, counts_L, None), scores_R)


@dataclass(frozen=True)
class Setting:
    """How the experts of one layer are reached.

    Attributes:
        call: the experts on local rows.
        tp_group, tp_axis: over which the layer sums, both ways, once, on [T, D], and its name; None where nothing is
            left to sum.
        holds_shared_experts: the shared expert's output is a term of that same sum.
    """

    platform: Platform
    exchange: Exchange
    call: LocalExperts
    tp_group: Group = None
    reduce_dtype: Any = None
    holds_shared_experts: bool = False
    tp_axis: str = "tp"

    @staticmethod
    def of(platform: Platform, moe: Any) -> "Setting":
        experts, sharded = moe.experts, platform.sharded(moe.experts)
        if not isinstance(sharded, ShardedExperts):
            exchange = RowsExchange(Places(platform, moe.router.num_experts, None, None))
            return Setting(
                platform, exchange, lambda rows, counts, scores: _called(platform, experts, rows, counts, scores)
            )
        if sharded.exchange is None:
            raise TypeError(
                f"{sharded.name}: {sharded.label} replaces the dispatch of bare experts only; in a MoE layer tokens "
                "travel by the exchange that the style's make_exchange returns: give it one (docs/adding_a_style.md)"
            )

        def call(rows: Tensor, counts: Tensor, scores: Tensor | None) -> Tensor:
            kept = Kept(scores) if scores is not None and platform.casts_inputs(experts) else scores
            return experts(rows, counts, kept, Caller.MOE_LAYER)

        group = None if sharded.exchange.sums_over_tp else sharded.tp_group
        shared = None if moe.shared_experts is None else platform.sharded(moe.shared_experts)
        holds_shared = group is not None and shared is not None and shared.tp_group == group
        dtype, axis = sharded.style.reduce_dtype, sharded.tp_axis
        return Setting(platform, sharded.exchange, call, group, dtype, holds_shared, axis)

    def enter(self, x: Tensor, what: str = "tokens") -> Tensor:
        """Into the part of the layer whose values are terms of a sum over tp."""
        if self.tp_group is None:
            return x
        name = f"moe: sum of the {what}' gradient over {self.tp_axis}"
        return self.platform.copy_to_group(x, self.tp_group, name, self.reduce_dtype)

    def leave(self, y_TD: Tensor) -> Tensor:
        """Out of it, with the sum."""
        if self.tp_group is None:
            return y_TD
        name = f"moe: sum of the output tokens over {self.tp_axis}"
        return self.platform.reduce_from_group(y_TD, self.tp_group, name, self.reduce_dtype)


def _called(platform: Platform, experts: Module, rows: Tensor, counts: Tensor, scores: Tensor | None) -> Tensor:
    # Experts that take no scores must still work for calls without them.
    return check_output(platform, experts(rows, counts) if scores is None else experts(rows, counts, scores), rows)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
