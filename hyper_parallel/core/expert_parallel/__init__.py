"""Experts over devices: the styles, the exchanges of tokens, and the arithmetic of router, experts and MoE layer."""

from hyper_parallel.core.expert_parallel.expert_parallel import (
    DedupExpertTensorParallel,
    ExpertParallel,
    ExpertTensorParallel,
    SplitExpertTensorParallel,
    TensorParallel,
)
from hyper_parallel.core.expert_parallel.sequence_parallel import MoESequenceParallel

__all__ = [
    "DedupExpertTensorParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "MoESequenceParallel",
    "SplitExpertTensorParallel",
    "TensorParallel",
]
