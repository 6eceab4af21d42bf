"""The public modules for PyTorch. Their arithmetic is in ``core.expert_parallel.moe``."""

import math

import torch
import torch.distributed.tensor as dt
from torch import nn

from hyper_parallel.core.expert_parallel import moe
from hyper_parallel.platform.torch import PLATFORM

__all__ = ["GroupedExperts", "FeedForward", "TokenChoiceTopKRouter", "MoE"]


class GroupedExperts(nn.Module):
    """All experts of a MoE layer in three stacked weights; SwiGLU ``w2(silu(w1 x) * (w3 x))``.

    Args:
        dim: D, size of a row.
        hidden_dim: H, hidden size of an expert.
        num_experts: E.

    Parameters: w1 and w3 ``[E, H, D]``, w2 ``[E, D, H]``.
    """

    def __init__(self, dim, hidden_dim, num_experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Draw every weight from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as ``nn.Linear`` does.

        Sharded weights get their part of the same draw, so ranks with the same random state end up with what one
        device has; each weight is whole on every rank while it is drawn.
        """
        for weight in (self.w1, self.w2, self.w3):
            bound = 1 / math.sqrt(weight.shape[2])
            if not isinstance(weight, dt.DTensor):
                weight.uniform_(-bound, bound)
                continue
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.to_local().device)
            whole.uniform_(-bound, bound)
            weight.copy_(dt.distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))

    def forward(self, x, num_tokens_per_expert, scores=None):
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
        return moe.grouped_experts(PLATFORM, self.w1, self.w2, self.w3, x, num_tokens_per_expert, scores)


class FeedForward(nn.Module):
    """Dense SwiGLU ``w2(silu(w1 x) * (w3 x))`` without biases, on ``[..., dim]``."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return moe.feed_forward(PLATFORM, self.w1, self.w2, self.w3, x)


class TokenChoiceTopKRouter(nn.Module):
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
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.route_norm, self.route_scale = score_func, route_norm, route_scale
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups

    def forward(self, x, expert_bias=None):
        """``x`` [T, D] -> scores [T, K] (fp32 or wider) and the experts' ids [T, K].

        ``expert_bias`` [E] is added to the scores for the choice, not to the scores that are returned.
        """
        return moe.route(PLATFORM, self, x, expert_bias)


class MoE(nn.Module):
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
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        bias = None if bias_update_rate is None else torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)

    def forward(self, x):
        """``[B, S, D]`` or ``[T, D]`` -> the same shape and dtype."""
        return moe.mixture_of_experts(PLATFORM, self, x)

    @torch.no_grad()
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

    def _apply(self, fn, *args, **kwargs):
        # A bias in bfloat16 would lose its updates: they are small beside it. It follows to a device, not to a dtype.
        bias, had_memory = self.expert_bias, not self.tokens_per_expert.is_meta
        super()._apply(fn, *args, **kwargs)
        if bias is not None:
            moved = self.expert_bias
            self.expert_bias = bias.to(moved.device) if had_memory and not moved.is_meta else moved.float()
        if not had_memory and not self.tokens_per_expert.is_meta:  # to_empty(); no reset_parameters() fills these
            for buffer in self.buffers(recurse=False):
                buffer.zero_()
        return self
