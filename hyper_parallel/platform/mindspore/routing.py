"""Routing: which rows go to which expert, and how many, on any device of MindSpore.

The CPU backend lacks many index operators; numpy has them, and reads a CPU tensor in place.

Shape suffixes: T tokens, K experts per token, E experts, R rows (T * K).
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.core.expert_parallel.exchange.rows import inverse_order
from hyper_parallel.platform.mindspore import device
from hyper_parallel.platform.mindspore.compat import Function
from hyper_parallel.platform.mindspore.rows import copied

__all__ = [
    "count_in_backward",
    "digests",
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
    logits_TE = logits_TE.astype(ms.float32) if logits_TE.dtype in (ms.float16, ms.bfloat16) else logits_TE
    if logits_TE.shape[0] == 0:
        return logits_TE
    return mint.softmax(logits_TE, -1) if score_func == "softmax" else mint.sigmoid(logits_TE)


def top_indices(x_TE, k):
    """int64 [T, k], columns of the k largest values of each row, largest first."""
    return Tensor(np.argsort(-x_TE.asnumpy(), axis=-1, kind="stable")[:, :k].astype(np.int64))


def multi_hot(index_TK, size):
    """fp32 [T, size], 1.0 at the indices of each row."""
    marks_TE = np.zeros((index_TK.shape[0], size), np.float32)
    np.put_along_axis(marks_TE, index_TK.asnumpy(), 1.0, axis=1)
    return Tensor(marks_TE)


def nonzero(x, num_nonzero):
    """int64 [num_nonzero], where the flat x is not 0."""
    return Tensor(np.flatnonzero(x.asnumpy()).astype(np.int64))


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; all int64."""
    experts_R = selected_TK.asnumpy().reshape(-1)
    order_R = np.argsort(experts_R, kind="stable")
    counts_E = np.bincount(experts_R, minlength=num_experts)
    return tuple(Tensor(values.astype(np.int64)) for values in (order_R, inverse_order(order_R), counts_E))


def take_along(x_TE, index_TK):
    """``y[t, k] = x[t, index[t, k]]``; the indices of a row differ."""
    return TakeAlong.apply(x_TE, index_TK)


def count_in_backward(x, counter_E, counts_E):
    """x; see ``Platform.count_in_backward``."""
    return CountInBackward.apply(x, counter_E, counts_E)


def digests(x, group, name):
    """Three integers per rank that differ where the bits of the ranks' x do; see ``Platform.digests``."""
    # numpy has no bfloat16: as float32, exactly.
    values = np.ascontiguousarray((x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy())
    bits = values.reshape(-1).view(f"i{values.itemsize}").astype(np.int64)
    # Each number counts with a weight of its place, modulo 2**64, so that no other order gives the same sum.
    weights = (np.arange(len(bits)) + 1) * np.int64(0x9E3779B97F4A7C1)
    digest = Tensor(np.array([x.shape[0], bits.sum(), (bits * weights).sum()], np.int64))
    return [vector.asnumpy().tolist() for vector in device.collectives().all_gather(digest, group, name)]


def rows_with_nan(x):
    """Which rows of x hold a NaN; see ``Platform.rows_with_nan``."""
    values = (x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy()
    if values.dtype.kind != "f" or values.size == 0:
        return []
    return np.flatnonzero(np.isnan(values).reshape(len(values), -1).any(1)).tolist()


class TakeAlong(Function):
    """``y[t, k] = x[t, index[t, k]]``; the indices of a row differ."""

    @staticmethod
    def forward(ctx, x_TE, index_TK):
        ctx.index_TK, ctx.num_columns = index_TK, x_TE.shape[1]
        return mint.gather(x_TE, 1, index_TK) if x_TE.shape[0] else mint.zeros(index_TK.shape, dtype=x_TE.dtype)

    @staticmethod
    def backward(ctx, grad_TK):
        zeros_TE = mint.zeros((grad_TK.shape[0], ctx.num_columns), dtype=grad_TK.dtype)
        return (mint.scatter(zeros_TE, 1, ctx.index_TK, grad_TK) if grad_TK.shape[0] else zeros_TE), None


class CountInBackward(Function):
    """Identity whose backward adds counts to a counter in place."""

    @staticmethod
    def forward(ctx, x, counter_E, counts_E):
        ctx.counter_E, ctx.counts_E = counter_E, counts_E
        return copied(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.counter_E.set_data(ctx.counter_E + ctx.counts_E)
        return grad, None, None
