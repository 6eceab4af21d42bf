"""Experts under ``mindspore.amp.auto_mixed_precision``.

Its levels cast the inputs of operators and cells, but an operator with a gradient of its own runs its backward outside
of them. So experts cast rows and weights before such an operator, and have nothing cast inside; the weights keep their
dtype and get gradients in it.
"""

from contextlib import contextmanager

import mindspore as ms

from hyper_parallel.core.expert_parallel.experts import grouped_experts
from hyper_parallel.platform.mindspore import compat

__all__ = ["experts"]


def experts(cell, x_RD, counts_E, scores_R):
    """``cell.run`` in the dtype that mixed precision asks for."""
    dtype = compat.mixed_precision_of(cell)
    if dtype is None:
        return cell.run(x_RD, counts_E, scores_R)
    w1_EHD, w2_EDH, w3_EHD = (weight.astype(dtype) for weight in (cell.w1, cell.w2, cell.w3))
    with _nothing_cast():
        return grouped_experts(cell.platform, w1_EHD, w2_EDH, w3_EHD, x_RD.astype(dtype), counts_E, scores_R)


@contextmanager
def _nothing_cast():
    compat.push_amp_strategy(compat.AmpLevel.AmpO0, ms.float32, [], [])
    try:
        yield
    finally:
        compat.pop_amp_strategy()
