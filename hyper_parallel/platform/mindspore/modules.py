"""The public modules for MindSpore. Their arithmetic is in ``core.expert_parallel.moe``."""

import math

import mindspore as ms
from mindspore import Parameter, mint, nn
from mindspore.common.initializer import Uniform, initializer

from hyper_parallel.core.expert_parallel import moe
from hyper_parallel.platform.mindspore import PLATFORM, kernels

__all__ = ["GroupedExperts", "FeedForward", "TokenChoiceTopKRouter", "MoE"]


class GroupedExperts(nn.Cell):
    """All experts of a MoE layer in three stacked weights; SwiGLU ``w2(silu(w1 x) * (w3 x))``.

    Weights are drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Args:
        dim: D, size of a row.
        hidden_dim: H, hidden size of an expert.
        num_experts: E.

    Parameters: w1 and w3 ``[E, H, D]``, w2 ``[E, D, H]``.
    """

    def __init__(self, dim, hidden_dim, num_experts):
        super().__init__()
        self.w1 = _weight("w1", num_experts, hidden_dim, dim)
        self.w2 = _weight("w2", num_experts, dim, hidden_dim)
        self.w3 = _weight("w3", num_experts, hidden_dim, dim)

    def construct(self, x, num_tokens_per_expert, scores=None):
        """Run every row through its expert.

        Args:
            x: rows [R, D], sorted by expert.
            num_tokens_per_expert: [E] integers, the number of rows of each expert; they sum to R.
            scores: [R] factors of the output rows, or None.

        Returns:
            [R, D] in x's dtype. Gradients flow to x, scores and the weights; an expert without rows gets zeros.

        Raises:
            TypeError: an input that is not a tensor. ValueError: shapes, dtypes or counts that do not fit.
        """
        return moe.grouped_experts(PLATFORM, self.w1, self.w2, self.w3, x, num_tokens_per_expert, scores)


def _weight(name, num_experts, out_features, in_features):
    bound = 1 / math.sqrt(in_features)
    shape = (num_experts, out_features, in_features)
    return Parameter(initializer(Uniform(bound), shape, ms.float32), name=name)


class _Linear(nn.Dense):
    """A linear layer without bias that takes no rows too: MindSpore's CPU product over none returns leftovers."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, has_bias=False)

    def construct(self, x):
        if 0 in x.shape:
            return kernels.LinearOfNoRows.apply(x, self.weight)
        return super().construct(x)


def _buffer(name, size, dtype):
    return Parameter(mint.zeros((size,), dtype=dtype), name=name, requires_grad=False)


class FeedForward(nn.Cell):
    """Dense SwiGLU ``w2(silu(w1 x) * (w3 x))`` without biases, on ``[..., dim]``."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = _Linear(dim, hidden_dim)
        self.w2 = _Linear(hidden_dim, dim)
        self.w3 = _Linear(dim, hidden_dim)

    def construct(self, x):
        return moe.feed_forward(PLATFORM, self.w1, self.w2, self.w3, x)


class TokenChoiceTopKRouter(nn.Cell):
    """Each token chooses its ``top_k`` experts by a linear gate.

    Args:
        dim: D. num_experts: E. top_k: K.
        score_func: "softmax" over all experts, or "sigmoid" of each; formed in fp32.
        route_norm: divide a token's K scores by their sum.
        route_scale: factor for the scores.
        num_expert_groups: cut the experts into this many groups, of which a token
        num_limited_groups: may use this many: those whose two best experts score highest together.
    """

    def __init__(
        self,
        dim,
        num_experts,
        top_k,
        score_func="softmax",
        route_norm=False,
        route_scale=1.0,
        num_expert_groups=None,
        num_limited_groups=None,
    ):
        super().__init__()
        moe.check_router(num_experts, top_k, score_func, num_expert_groups, num_limited_groups)
        self.gate = _Linear(dim, num_experts)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.route_norm, self.route_scale = score_func, route_norm, route_scale
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups

    def construct(self, x, expert_bias=None):
        """``x`` [T, D] -> scores [T, K] (fp32 or wider) and the experts' ids [T, K].

        ``expert_bias`` [E] is added to the scores for the choice, not to the scores that are returned.
        """
        return moe.route(PLATFORM, self, x, expert_bias)


class MoE(nn.Cell):
    """A Mixture-of-Experts layer: router, routed experts, and optionally a shared expert that sees every token.

    Shard it with ``ExpertTensorParallel().apply(moe.experts, mesh)``; the layer then sums over tp once, on ``[T, D]``.
    ``TensorParallel().apply(moe.shared_experts, mesh["tp"])`` brings the shared expert into that same sum.

    Args:
        dim: D. hidden_dim: H of one expert. num_experts: E. top_k: experts per token.
        num_shared_experts: size of the shared expert, in units of hidden_dim; 0 for none.
        score_position: scores multiply rows "inside" the experts (before w2; no memory of its own), "before" or
            "after" them. Inside and after mean the same, apart from rounding.
        bias_update_rate: step of the expert bias, see :meth:`update_expert_bias`; None for no bias.
        router: further arguments of :class:`TokenChoiceTopKRouter`.

    Attributes:
        tokens_per_expert: int64 [E], rows routed to each expert by this rank since the last update. Counted when the
            backward pass comes by: once per step, whether or not the layer is recomputed, and not in evaluation.
        expert_bias: fp32 [E] or None.
    """

    def __init__(
        self,
        dim,
        hidden_dim,
        num_experts,
        top_k,
        *,
        num_shared_experts=0,
        score_position="inside",
        bias_update_rate=None,
        **router,
    ):
        super().__init__()
        if score_position not in ("before", "inside", "after"):
            raise ValueError(f'score_position must be "before", "inside" or "after", got {score_position!r}')
        self.router = TokenChoiceTopKRouter(dim, num_experts, top_k, **router)
        self.experts = GroupedExperts(dim, hidden_dim, num_experts)
        self.shared_experts = FeedForward(dim, hidden_dim * num_shared_experts) if num_shared_experts else None
        self.score_position, self.bias_update_rate = score_position, bias_update_rate
        self.tokens_per_expert = _buffer("tokens_per_expert", num_experts, ms.int64)
        self.expert_bias = None if bias_update_rate is None else _buffer("expert_bias", num_experts, ms.float32)

    def construct(self, x):
        """``[B, S, D]`` or ``[T, D]`` -> the same shape and dtype."""
        return moe.mixture_of_experts(PLATFORM, self, x)

    def update_expert_bias(self, device_mesh=None):
        """Balance the load without an auxiliary loss; call it once per step, after the backward pass.

        ``expert_bias += bias_update_rate * sign(mean load - load)``, and the counting starts anew.

        Args:
            device_mesh: the axes whose ranks route different tokens, such as ``mesh["ep"]`` or ``mesh["dp", "ep"]``,
                over which the load is summed; not tp. Every rank of it must call this.
        """
        if self.expert_bias is None:
            raise ValueError("this layer has no expert bias; construct it with bias_update_rate")
        moe.update_expert_bias(PLATFORM, self, device_mesh)
