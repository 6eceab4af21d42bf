"""The public modules for MindSpore. Their arithmetic is in ``core.expert_parallel.moe``."""

import math

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.common.initializer import Uniform, initializer

from hyper_parallel.core.expert_parallel import moe
from hyper_parallel.platform.mindspore import PLATFORM

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


class FeedForward(nn.Cell):
    """Dense SwiGLU ``w2(silu(w1 x) * (w3 x))`` without biases, on ``[..., dim]``."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Dense(dim, hidden_dim, has_bias=False)
        self.w2 = nn.Dense(hidden_dim, dim, has_bias=False)
        self.w3 = nn.Dense(dim, hidden_dim, has_bias=False)

    def construct(self, x):
        return moe.feed_forward(PLATFORM, self.w1, self.w2, self.w3, x)


class TokenChoiceTopKRouter(nn.Cell):
    """Each token chooses its ``top_k`` experts by a linear gate.

    Args:
        dim: D. num_experts: E. top_k: K.
        score_func: "softmax" over all experts, or "sigmoid" of each.
        route_norm: divide a token's K scores by their sum.
        route_scale: factor for the scores.
    """

    def __init__(self, dim, num_experts, top_k, score_func="softmax", route_norm=False, route_scale=1.0):
        super().__init__()
        moe.check_router(num_experts, top_k, score_func)
        self.gate = nn.Dense(dim, num_experts, has_bias=False)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.route_norm, self.route_scale = score_func, route_norm, route_scale

    def construct(self, x):
        """``x`` [T, D] -> scores [T, K] (fp32 for half-precision x) and the experts' ids [T, K]."""
        return moe.route(PLATFORM, self, x)


class MoE(nn.Cell):
    """A Mixture-of-Experts layer: router, routed experts, and optionally shared experts that see every token.

    Shard it with ``ExpertTensorParallel().apply(moe.experts, mesh)``.

    Args:
        dim: D. hidden_dim: H of one expert. num_experts: E. top_k: experts per token.
        num_shared_experts: size of the shared expert, in units of hidden_dim; 0 for none.
        score_func, route_norm, route_scale: see :class:`TokenChoiceTopKRouter`.
    """

    def __init__(
        self,
        dim,
        hidden_dim,
        num_experts,
        top_k,
        *,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=False,
        route_scale=1.0,
    ):
        super().__init__()
        self.router = TokenChoiceTopKRouter(dim, num_experts, top_k, score_func, route_norm, route_scale)
        self.experts = GroupedExperts(dim, hidden_dim, num_experts)
        self.shared_experts = FeedForward(dim, hidden_dim * num_shared_experts) if num_shared_experts else None

    def construct(self, x):
        """``[B, S, D]`` or ``[T, D]`` -> the same shape and dtype."""
        return moe.mixture_of_experts(PLATFORM, self, x)
