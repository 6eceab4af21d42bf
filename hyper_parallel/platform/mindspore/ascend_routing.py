"""Routing on Ascend devices. The names and meanings are those of ``routing``; nothing waits for the device.

Shape suffixes: T tokens, K experts per token, E experts, R rows (T * K).
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore import routing
from hyper_parallel.platform.mindspore.routing import (
    count_in_backward,
    digests,
    probabilities,
    rows_with_nan,
    take_along,
)

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


def top_indices(x_TE, k):
    """int64 [T, k], columns of the k largest values of each row, largest first."""
    if x_TE.shape[0] == 0:
        return mint.zeros((0, k), dtype=ms.int64)
    return mint.topk(x_TE, k, -1)[1].astype(ms.int64)


def multi_hot(index_TK, size):
    """fp32 [T, size], 1.0 at the indices of each row."""
    marks_TE = mint.zeros((index_TK.shape[0], size), dtype=ms.float32)
    if 0 in index_TK.shape:
        return marks_TE
    return mint.scatter(marks_TE, 1, index_TK, mint.ones(index_TK.shape, dtype=ms.float32))


def nonzero(x, num_nonzero):
    """int64 [num_nonzero], where the flat x is not 0. Their number is known: nothing waits for the device."""
    if num_nonzero == 0:
        return mint.zeros((0,), dtype=ms.int64)
    return _stable_order((x == 0).astype(ms.int32))[:num_nonzero]


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; all int64."""
    experts_R = selected_TK.reshape((selected_TK.shape[0] * selected_TK.shape[1],)).astype(ms.int64)
    if experts_R.shape[0] == 0:
        return routing.sort_by_expert(selected_TK, num_experts)
    sorted_R, order_R = mint.sort(experts_R, stable=True)
    order_R = order_R.astype(ms.int64)
    # Rows of an expert: from where its id could be inserted first to where it could be inserted last.
    ids_E = Tensor(np.arange(num_experts))
    counts_E = mint.searchsorted(sorted_R, ids_E, right=True) - mint.searchsorted(sorted_R, ids_E)
    return order_R, _stable_order(order_R), counts_E.astype(ms.int64)


def _stable_order(values):
    return mint.sort(values, stable=True)[1].astype(ms.int64)
