"""Routing: which rows go to which expert, and how many.

Shape suffixes: T tokens, K experts per token, E experts, R rows (T * K).
"""

import torch
from torch.autograd.function import once_differentiable

from hyper_parallel.platform.torch import collectives

# The integers of the same size as a number.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

__all__ = [
    "count_in_backward",
    "digests",
    "floor_divide",
    "multi_hot",
    "nonzero",
    "probabilities",
    "rows_with_nan",
    "sort_by_expert",
    "take_along",
    "top_indices",
]


def probabilities(logits_TE, score_func):
    """ "softmax" or "sigmoid" of the logits, in float32 or wider; see ``Platform.probabilities``."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return torch.softmax(logits_TE, -1) if score_func == "softmax" else torch.sigmoid(logits_TE)


def top_indices(x_TE, k):
    """Columns of the k largest values of each row, largest first."""
    return torch.topk(x_TE, k, dim=-1).indices


def take_along(x_TE, index_TK):
    """``y[t, k] = x[t, index[t, k]]``."""
    return x_TE.gather(-1, index_TK)


def multi_hot(index_TK, size):
    """float32 [T, size], 1.0 at the indices of each row."""
    return torch.zeros(index_TK.shape[0], size, device=index_TK.device).scatter_(1, index_TK, 1.0)


def floor_divide(x, divisor):
    """``x // divisor``; see ``Platform.floor_divide``."""
    return x // divisor


def nonzero(x, num_nonzero):
    """Where the flat x is not 0. Not torch.nonzero, which would have the host wait to learn how many there are."""
    return torch.argsort((x == 0).to(torch.uint8), stable=True)[:num_nonzero]


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; see ``Platform.sort_by_expert``."""
    experts_R = selected_TK.reshape(-1)
    order_R = torch.argsort(experts_R, stable=True)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    counts_E = experts_R.new_zeros(num_experts).scatter_add_(0, experts_R, torch.ones_like(experts_R))
    return order_R, inverse_R, counts_E


def count_in_backward(x, counter_E, counts_E):
    """x; see ``Platform.count_in_backward``."""
    return CountInBackward.apply(x, counter_E, counts_E)


def digests(x, group, name):
    """Three integers per rank that differ where the bits of the ranks' x do; see ``Platform.digests``."""
    bits = x.detach().contiguous().reshape(-1).view(INTEGERS[x.element_size()]).to(torch.int64)
    # Each number counts with a weight of its place, modulo 2**64, so that no other order gives the same sum.
    weights = (torch.arange(len(bits), device=x.device) + 1) * 0x9E3779B97F4A7C1
    digest = torch.stack([torch.tensor(x.shape[0], device=x.device), bits.sum(), (bits * weights).sum()])
    return collectives.all_gather_vector(digest, group, name).tolist()


def rows_with_nan(x):
    """Which rows of x hold a NaN; see ``Platform.rows_with_nan``."""
    if not x.is_floating_point() or x.numel() == 0:
        return []
    return torch.isnan(x.detach()).reshape(x.shape[0], -1).any(1).nonzero().flatten().tolist()


class CountInBackward(torch.autograd.Function):
    """Identity whose backward adds counts to a counter in place."""

    @staticmethod
    def forward(ctx, x, counter_E, counts_E):
        ctx.counter_E, ctx.counts_E = counter_E, counts_E
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.counter_E.add_(ctx.counts_E)
        return grad, None, None
