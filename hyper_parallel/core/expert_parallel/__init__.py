"""Experts over devices: the styles, the exchanges of tokens, and the arithmetic of router, experts and MoE layer."""

from hyper_parallel.core.expert_parallel.expert_parallel import (
    DedupExpertTensorParallel,
    ExpertParallel,
    ExpertTensorParallel,
    SplitExpertTensorParallel,
    TensorParallel,
)

__all__ = [
    "DedupExpertTensorParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "SplitExpertTensorParallel",
    "TensorParallel",
]
