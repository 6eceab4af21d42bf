"""Routing on Ascend devices. The names are those of ``routing``; the dtypes are those that run on the AI cores.

CANN sorts, scatters and divides int64, and sorts uint8, on the AICPU, which is far slower. Sorts are of float32 here,
exact for whole numbers up to 2**24, and the other two of int32.

Shape suffixes: T tokens, K experts per token, E experts, R rows (T * K).
"""

import torch

from hyper_parallel.platform.torch.routing import (
    count_in_backward,
    digests,
    multi_hot,
    probabilities,
    rows_with_nan,
    take_along,
    top_indices,
)

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


def floor_divide(x, divisor):
    """``x // divisor``; see ``Platform.floor_divide``."""
    return (x.to(torch.int32) // divisor).to(torch.int64)


def nonzero(x, num_nonzero):
    """Where the flat x is not 0; see ``routing.nonzero``."""
    return torch.argsort((x == 0).to(torch.float32), stable=True)[:num_nonzero]


def sort_by_expert(selected_TK, num_experts):
    """Stable order of the rows by expert, its inverse, and rows per expert; see ``Platform.sort_by_expert``."""
    experts_R = selected_TK.reshape(-1)
    order_R = torch.argsort(experts_R.to(torch.float32), stable=True)
    places_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
    inverse_R = torch.empty_like(places_R).scatter_(0, order_R, places_R)
    counts_E = places_R.new_zeros(num_experts).scatter_add_(0, experts_R, torch.ones_like(places_R))
    return order_R, inverse_R.to(torch.int64), counts_E.to(torch.int64)
