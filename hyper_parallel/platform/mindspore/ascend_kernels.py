"""Row kernels and routing operators of MindSpore on Ascend devices. The names and meanings are those of ``kernels``.

Written after the documents of MindSpore 2.10 and CANN; there was no device to run them on. Where an operator's
document excludes a case, the portable kernel computes, from operators that every MindSpore device has.

- ``grouped_matmul_v4`` has a gradient for ``split_item=3, group_type=0`` only. MindSpore's document asks for positive
  counts; CANN's (aclnnGroupedMatmulV4) allows 0 as well, but the part of a result that no count speaks of is not
  written, and the weights' gradient of an expert without rows would be such a part. So only the experts with rows
  are handed over: the gradient of leaving out the others is zero for them.
- The order of rows is known when they are taken, and ``moe_token_permute`` would sort to find it. Rows are gathered;
  the sum over the copies of a row in the gradient is ``moe_token_unpermute``.

Shape suffixes: R rows, E experts, D input features, N output features, H hidden size, T tokens, K experts per token.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import grouped_matmul_v4

from hyper_parallel.platform.mindspore import kernels
from hyper_parallel.platform.mindspore.kernels import (
    CountInBackward,
    GatherRows,
    LinearOfNoRows,
    Pick,
    SumRows,
    row_groups,
)

__all__ = [
    "TakeRows",
    "SumCopies",
    "GatherRows",
    "SumRows",
    "Pick",
    "LinearOfNoRows",
    "CountInBackward",
    "row_groups",
    "grouped_linear",
    "swiglu",
    "product_of_groups",
    "swiglu_of_halves",
    "sum_of_copies",
    "top_indices",
    "mark",
    "marked_positions",
    "sort_by_expert",
]

DTYPES = (ms.float16, ms.bfloat16, ms.float32)
# Limits in the documents of aclnnGroupedMatmulV4 and MoeTokenUnpermute.
MAX_GROUPS = 1024
MAX_FEATURES = 65535
MAX_COPIES = 512


# The three calls of operators that only Ascend devices have.


def product_of_groups(x_RD, w_EDN, counts_E):
    """``x @ w[e]`` for ``counts[e]`` rows after each other; all counts positive, int64 on the device."""
    # group_list_type=1: counts, not their running sum.
    return grouped_matmul_v4([x_RD], [w_EDN], group_list=counts_E, split_item=3, group_type=0, group_list_type=1)[0]


def swiglu_of_halves(gate_and_up):
    """``silu(first half of the last dim) * second half``."""
    return ops.swiglu(gate_and_up, -1)


def sum_of_copies(rows_RD, position_R, ones_TK):
    """``y[t]`` = sum over k of ``rows[position[t * K + k]]``: [T, D]. Without the factors K would be 1."""
    return ops.moe_token_unpermute(rows_RD, position_R, ones_TK)


class TakeRows(kernels.TakeRows):
    """``y[i] = x[index[i] // copies]``."""

    @staticmethod
    def backward(ctx, grad):
        return _sum_copies(grad, ctx.inverse_R, ctx.copies), None, None, None


class SumCopies(kernels.SumCopies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``."""

    @staticmethod
    def forward(ctx, x_RD, index_R, inverse_R, copies):
        ctx.index_R, ctx.copies = index_R, copies
        return _sum_copies(x_RD, inverse_R, copies)


def _sum_copies(x, inverse_R, copies):
    fits = len(x.shape) == 2 and x.shape[0] > 0 and x.dtype in DTYPES
    if not (fits and 1 < copies <= MAX_COPIES):
        return kernels.sum_copies(x, inverse_R, copies)
    ones_TK = mint.ones((x.shape[0] // copies, copies), dtype=x.dtype)
    return sum_of_copies(x.contiguous(), inverse_R.astype(ms.int32), ones_TK)


def grouped_linear(x_RD, w_END, groups):
    """``y = x @ w[e].T`` for the rows of each expert e: [R, N]."""
    counts = {expert: stop - start for expert, (start, stop) in enumerate(groups) if stop > start}
    # Older documents of CANN exclude a list of one group; that is one product anyway.
    fits = 1 < len(counts) <= MAX_GROUPS and max(w_END.shape[1:]) <= MAX_FEATURES and x_RD.dtype in DTYPES
    if not fits:
        return kernels.grouped_linear(x_RD, w_END, groups)
    if len(counts) < w_END.shape[0]:
        w_END = ops.gather(w_END, Tensor(np.array(list(counts), np.int64)), 0)
    w_EDN = ops.transpose(w_END, (0, 2, 1)).contiguous()
    group_list = Tensor(np.array(list(counts.values()), np.int64))
    return grouped_matmul_v4([x_RD], [w_EDN], group_list=group_list, split_item=3, group_type=0, group_list_type=1)[0]


def swiglu(gate, up, scores=None):
    """``silu(gate) * up``, times one score per row where given."""
    if 0 in gate.shape or gate.dtype not in DTYPES:
        return kernels.swiglu(gate, up, scores)
    hidden = swiglu_of_halves(mint.cat((gate, up), -1))
    return hidden if scores is None else (hidden * scores.reshape((scores.shape[0], 1))).astype(gate.dtype)


def top_indices(x_TE, k):
    """int64 [T, k], columns of the k largest values of each row, largest first."""
    if x_TE.shape[0] == 0:
        return mint.zeros((0, k), dtype=ms.int64)
    return mint.topk(x_TE, k, -1)[1].astype(ms.int64)


def mark(index_TK, size):
    """fp32 [T, size], 1.0 at the indices of each row."""
    marks_TE = mint.zeros((index_TK.shape[0], size), dtype=ms.float32)
    if 0 in index_TK.shape:
        return marks_TE
    return mint.scatter(marks_TE, 1, index_TK, mint.ones(index_TK.shape, dtype=ms.float32))


def marked_positions(marks, num_marked):
    """int64 [num_marked], where the flat ``marks`` are not 0. Their number is known: nothing waits for the device."""
    if num_marked == 0:
        return mint.zeros((0,), dtype=ms.int64)
    return _stable_order((marks == 0).astype(ms.int32))[:num_marked]


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; all int64."""
    experts_R = selected_TK.reshape((selected_TK.shape[0] * selected_TK.shape[1],)).astype(ms.int64)
    if experts_R.shape[0] == 0:
        return kernels.sort_by_expert(selected_TK, num_experts)
    sorted_R, order_R = mint.sort(experts_R, stable=True)
    order_R = order_R.astype(ms.int64)
    # Rows of an expert: from where its id could be inserted first to where it could be inserted last.
    ids_E = Tensor(np.arange(num_experts))
    counts_E = mint.searchsorted(sorted_R, ids_E, right=True) - mint.searchsorted(sorted_R, ids_E)
    return order_R, _stable_order(order_R), counts_E.astype(ms.int64)


def _stable_order(values):
    return mint.sort(values, stable=True)[1].astype(ms.int64)
