"""The arithmetic of experts, written once for both frameworks.

Shape suffixes: R rows, E experts, H hidden size, D model size.
"""

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.expert_parallel.checks import ExpertShapes, check_fit, check_inputs, product
from hyper_parallel.core.types import Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["feed_forward", "grouped_experts", "row_groups"]


def grouped_experts(
    platform: Platform,
    w1_EHD: Tensor,
    w2_EDH: Tensor,
    w3_EHD: Tensor,
    x_RD: Tensor,
    num_tokens_per_expert_E: Tensor,
    scores_R: Tensor | None = None,
) -> Tensor:
    """SwiGLU experts on rows sorted by expert: ``scores * w2(silu(w1 x) * (w3 x))``.

    The scores enter before w2, where they cost no memory of their own; w2 is linear, so they scale the output row.

    Returns:
        [R, D]; with weights that hold a slice of the hidden dim, this slice's term of it.
    """
    if not platform.made_by_host(num_tokens_per_expert_E):  # else a dispatch made them, of inputs that were checked
        num_experts, hidden_dim, dim = (int(size) for size in w1_EHD.shape)
        shapes = ExpertShapes(num_experts, hidden_dim, dim)
        num_tokens_per_expert_E = check_inputs(platform, shapes, x_RD, num_tokens_per_expert_E, scores_R)
    check_fit(platform, x_RD, w1_EHD)
    return platform.swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)


def feed_forward(platform: Platform, w1: Any, w2: Any, w3: Any, x: Tensor) -> Tensor:
    """Dense SwiGLU on [..., D]; ``w1``, ``w2``, ``w3`` are the framework's linear layers."""
    return w2(platform.swiglu(product(platform, w1, x), w3(x)))


def row_groups(counts: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(expert, first row, row after the last) of every expert that has rows, for rows sorted by expert."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, start, start + count))
        start += count
    return tuple(groups)
