"""Rows on Ascend devices, by torch_npu's operators, with hand-written gradients. The names are those of ``rows``.

Shape suffixes: R rows, T rows before they are copied, D model size.
"""

import torch

from hyper_parallel.platform.torch import rows
from hyper_parallel.platform.torch.npu_operators import runs
from hyper_parallel.platform.torch.rows import index_add, index_select, scale_rows

__all__ = ["index_add", "index_select", "permute", "scale_rows", "unpermute"]

# Documented limit (aclnnMoeTokenUnpermute).
MAX_COPIES = 512


def permute(x, order_R, inverse_R, copies=1):
    """``rows.Permute``, with another gradient where rows are taken several times.

    The order is known already, and npu_moe_token_permute would sort to find it: rows are taken by index_select in both
    directions, which is exact. Only the sum over the copies of a row is better left to npu_moe_token_unpermute: it
    reads every gradient row once and writes the sums, without reordered rows in between.
    """
    if _unpermute_runs(x, copies):
        return _PermuteCopies.apply(x, order_R, inverse_R, copies)
    return rows.permute(x, order_R, inverse_R, copies)


def unpermute(x_RD, order_R, inverse_R, copies):
    """``rows.Unpermute``: the same two operators, forward and backward exchanged."""
    if _unpermute_runs(x_RD, copies):
        return _UnpermuteCopies.apply(x_RD, order_R, inverse_R, copies)
    return rows.unpermute(x_RD, order_R, inverse_R, copies)


def _unpermute_runs(x, copies):
    if copies == 1 or x.dim() != 2:
        return False
    obstacle = f"{copies} copies of a row are more than {MAX_COPIES}" if copies > MAX_COPIES else None
    return runs("npu_moe_token_unpermute", x.dtype, obstacle)


def _sum_of_copies(x_RD, inverse_R, copies):
    import torch_npu

    num_rows = x_RD.shape[0] // copies
    if num_rows == 0:
        return torch.empty_like(x_RD)
    # Weights of one: without any, the operator takes every row for the only copy.
    ones = x_RD.new_ones(num_rows, copies)
    return torch_npu.npu_moe_token_unpermute(x_RD.contiguous(), inverse_R.to(torch.int32), probs=ones)


class _PermuteCopies(rows.Permute):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RD):
        (inverse_R,) = ctx.saved_tensors
        return _sum_of_copies(grad_RD, inverse_R, ctx.copies), None, None, None


class _UnpermuteCopies(rows.Unpermute):
    @staticmethod
    def forward(ctx, x_RD, order_R, inverse_R, copies):
        ctx.save_for_backward(order_R)
        ctx.copies = copies
        return _sum_of_copies(x_RD, inverse_R, copies)
