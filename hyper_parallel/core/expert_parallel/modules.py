"""The public modules, but for what a framework must say itself: constructors, checks and contracts.

A platform's class inherits from one of these and from its module class. It makes parameters, linear layers and buffers,
and gives its forward method the name that its framework calls.

Shape suffixes in words: T tokens, K experts per token, R rows, E experts, H hidden size, D model size.
"""

from typing import Any

from hyper_parallel.core.expert_parallel import load, moe
from hyper_parallel.core.expert_parallel.experts import feed_forward, grouped_experts
from hyper_parallel.core.expert_parallel.router import check_router, check_sizes, route
from hyper_parallel.core.expert_parallel.tokens import TokenLayout
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["FeedForwardBase", "GroupedExpertsBase", "MoEBase", "RouterBase"]


class GroupedExpertsBase:
    """All experts of a MoE layer in three stacked weights; SwiGLU ``w2(silu(w1 x) * (w3 x))``.

    Weights are drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Parameters: w1 and w3 ``[E, H, D]``, w2 ``[E, D, H]``.
    """

    platform: Platform

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        """
        Args:
            dim: D, size of a row.
            hidden_dim: H, hidden size of an expert.
            num_experts: E.
        """
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
        self.w1 = self._weight("w1", num_experts, hidden_dim, dim)
        self.w2 = self._weight("w2", num_experts, dim, hidden_dim)
        self.w3 = self._weight("w3", num_experts, hidden_dim, dim)

    def run(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        """Run every row through its expert.

        Args:
            x: rows [R, D], sorted by expert.
            num_tokens_per_expert: [E] integers, the number of rows of each expert; they sum to R.
            scores: [R] factors of the output rows, or None.

        Returns:
            [R, D] in x's dtype. Gradients flow to x, scores and the weights; an expert without rows gets zeros.

        Raises:
            TypeError: an input that is not a plain tensor. ValueError: shapes, dtypes or counts that do not fit.
        """
        weights = self.w1, self.w2, self.w3
        return self.platform.eagerly(grouped_experts, self.platform, *weights, x, num_tokens_per_expert, scores)

    def _weight(self, name: str, num_experts: int, out_features: int, in_features: int) -> Any:
        """A parameter [E, out, in] with its first values."""
        raise NotImplementedError


class FeedForwardBase:
    """Dense SwiGLU ``w2(silu(w1 x) * (w3 x))`` without biases, on ``[..., dim]``."""

    platform: Platform

    def __init__(self, dim: int, hidden_dim: int) -> None:
        """
        Args:
            dim: D. hidden_dim: H.
        """
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim)
        self.w1 = self._linear(dim, hidden_dim)
        self.w2 = self._linear(hidden_dim, dim)
        self.w3 = self._linear(dim, hidden_dim)

    def run(self, x: Tensor) -> Tensor:
        """``[..., D]`` -> the same shape and dtype."""
        return feed_forward(self.platform, self.w1, self.w2, self.w3, x)

    def _linear(self, in_features: int, out_features: int) -> Any:
        """A linear layer without bias."""
        raise NotImplementedError


class RouterBase:
    """Each token chooses its ``top_k`` experts by a linear gate."""

    platform: Platform

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: str = "softmax",
        route_norm: bool = False,
        route_scale: float = 1.0,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        group_score_top_k: int = 2,
    ) -> None:
        """
        Args:
            dim: D. num_experts: E. top_k: K.
            score_func: "softmax" over all experts, or "sigmoid" of each; formed in fp32.
            route_norm: divide a token's K scores by their sum.
            route_scale: factor for the scores.
            num_expert_groups: cut the experts into this many groups, of which a token
            num_limited_groups: may use this many: those whose
            group_score_top_k: best experts score highest together.

        Raises:
            ValueError: sizes or names that no router can have.
        """
        super().__init__()
        check_router(num_experts, top_k, score_func, num_expert_groups, num_limited_groups, group_score_top_k)
        self.gate = self._linear(dim, num_experts)
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.score_func, self.route_norm, self.route_scale = score_func, route_norm, route_scale
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.group_score_top_k = group_score_top_k

    def run(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` [T, D] -> scores [T, K] (fp32 or wider) and the experts' ids [T, K].

        ``expert_bias`` [E] is added to the scores for the choice, not to the scores that are returned.
        """
        return route(self.platform, self, x, expert_bias)

    def _linear(self, in_features: int, out_features: int) -> Any:
        """A linear layer without bias."""
        raise NotImplementedError


class MoEBase:
    """A Mixture-of-Experts layer: router, routed experts, and optionally a shared expert that sees every token.

    Shard it with ``ExpertTensorParallel().apply(moe.experts, mesh)``; the layer then sums over tp once, on ``[T, D]``.
    ``TensorParallel().apply(moe.shared_experts, mesh["tp"])`` brings the shared expert into that same sum.

    Attributes:
        tokens_per_expert: int64 [E], rows routed to each expert by this rank since the last update. Counted when the
            backward pass comes by: once per step, whether or not the layer is recomputed, and not in evaluation.
        expert_bias: fp32 [E] or None.
        token_layout: what ``MoESequenceParallel`` says of input and output, or None.
    """

    platform: Platform
    tokens_per_expert: Tensor
    expert_bias: Tensor | None
    token_layout: TokenLayout | None = None
    # The platform's other modules.
    router_class: type
    experts_class: type
    feed_forward_class: type

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared_experts: int = 0,
        shared_gate: bool = False,
        score_position: str = "inside",
        bias_update_rate: float | None = None,
        score_func: str = "softmax",
        route_norm: bool = False,
        route_scale: float = 1.0,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        group_score_top_k: int = 2,
    ) -> None:
        """
        Args:
            dim: D. hidden_dim: H of one expert. num_experts: E. top_k: experts per token.
            num_shared_experts: size of the shared expert, in units of hidden_dim; 0 for none.
            shared_gate: multiply a token's shared output by ``sigmoid`` of a linear gate (D -> 1), as Qwen2-MoE does.
            score_position: scores multiply rows "inside" the experts (before w2; no memory of its own), "before" or
                "after" them. Inside and after mean the same, apart from rounding.
            bias_update_rate: step of the expert bias, see :meth:`update_expert_bias`; None for no bias.
            score_func, route_norm, route_scale, num_expert_groups, num_limited_groups, group_score_top_k: of
                ``TokenChoiceTopKRouter``.

        Raises:
            ValueError: sizes or names that no layer can have.
        """
        super().__init__()
        if score_position not in ("before", "inside", "after"):
            raise ValueError(f'score_position must be "before", "inside" or "after", got {score_position!r}')
        if shared_gate and not num_shared_experts:
            raise ValueError("shared_gate=True needs a shared expert; give num_shared_experts")
        groups = num_expert_groups, num_limited_groups, group_score_top_k
        self.router = self.router_class(dim, num_experts, top_k, score_func, route_norm, route_scale, *groups)
        self.experts = self.experts_class(dim, hidden_dim, num_experts)
        shared_dim = hidden_dim * num_shared_experts
        self.shared_experts = self.feed_forward_class(dim, shared_dim) if num_shared_experts else None
        self.shared_gate = self._linear(dim, 1) if shared_gate else None
        self.score_position, self.bias_update_rate = score_position, bias_update_rate
        self._make_buffers(num_experts)

    def run(self, x: Tensor) -> Tensor:
        """``[B, S, D]`` or ``[T, D]`` -> the same shape and dtype (under autocast, its dtype). Under
        ``MoESequenceParallel`` both are this rank's part of the tokens."""
        return moe.mixture_of_experts(self.platform, self, x)

    def after_routing(self, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor) -> Tensor:
        """What the layer does with the tokens once the router has chosen; see ``run``."""
        return moe.through_experts(self.platform, self, x_TD, scores_TK, selected_TK)

    def update_expert_bias(self, device_mesh: Mesh | None = None) -> None:
        """Balance the load without an auxiliary loss; call it once per step, after the backward pass.

        ``expert_bias += bias_update_rate * sign(mean load - load)``, and the counting starts anew.

        Args:
            device_mesh: the axes whose ranks route different tokens, such as ``mesh["ep"]`` or ``mesh["dp", "ep"]``,
                over which the load is summed; not tp. Every rank of it must call this.
        """
        if self.expert_bias is None:
            raise ValueError("this layer has no expert bias; construct it with bias_update_rate")
        load.update_expert_bias(self.platform, self, device_mesh)

    def _linear(self, in_features: int, out_features: int) -> Any:
        """A linear layer without bias."""
        raise NotImplementedError

    def _make_buffers(self, num_experts: int) -> None:
        """Make ``tokens_per_expert`` (zeros, no part of a checkpoint where the framework can say so), and
        ``expert_bias`` (zeros, or None without a ``bias_update_rate``)."""
        raise NotImplementedError
