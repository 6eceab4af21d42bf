"""Rows on Ascend devices. The names and meanings are those of ``rows``.

Written after the documents of MindSpore 2.10 and CANN; there was no device to run it on. The order of rows is known
when they are taken, and ``moe_token_permute`` would sort to find it. Rows are gathered; the sum over the copies of a
row in the gradient is ``moe_token_unpermute``.

Shape suffixes: R rows, T rows before they are copied, K copies, D model size.
"""

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import rows
from hyper_parallel.platform.mindspore.rows import copied, index_add, index_select, scale_rows

__all__ = ["copied", "index_add", "index_select", "permute", "scale_rows", "sum_of_copies", "unpermute"]

DTYPES = (ms.float16, ms.bfloat16, ms.float32)
# Limit in the document of MoeTokenUnpermute.
MAX_COPIES = 512


def permute(x, order_R, inverse_R, copies=1):
    """``y[i] = x[order[i] // copies]``."""
    return Permute.apply(x, order_R, inverse_R, copies)


def unpermute(x_RD, order_R, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``."""
    return Unpermute.apply(x_RD, order_R, inverse_R, copies)


def sum_of_copies(rows_RD, position_R, ones_TK):
    """``y[t]`` = sum over k of ``rows[position[t * K + k]]``: [T, D]. Without the factors K would be 1."""
    return ops.moe_token_unpermute(rows_RD, position_R, ones_TK)


class Permute(rows.Permute):
    """``y[i] = x[order[i] // copies]``."""

    @staticmethod
    def backward(ctx, grad):
        return _summed_copies(grad, ctx.inverse_R, ctx.copies), None, None, None


class Unpermute(rows.Unpermute):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``."""

    @staticmethod
    def forward(ctx, x_RD, order_R, inverse_R, copies):
        ctx.order_R, ctx.copies = order_R, copies
        return _summed_copies(x_RD, inverse_R, copies)


def _summed_copies(x, inverse_R, copies):
    fits = len(x.shape) == 2 and x.shape[0] > 0 and x.dtype in DTYPES
    if not (fits and 1 < copies <= MAX_COPIES):
        return rows.summed_copies(x, inverse_R, copies)
    ones_TK = mint.ones((x.shape[0] // copies, copies), dtype=x.dtype)
    return sum_of_copies(x.contiguous(), inverse_R.astype(ms.int32), ones_TK)
