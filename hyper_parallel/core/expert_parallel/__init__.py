"""Experts over devices: the styles, the token exchange and the arithmetic of the MoE layer."""

from hyper_parallel.core.expert_parallel.expert_parallel import ExpertParallel, ExpertTensorParallel, TensorParallel
from hyper_parallel.core.expert_parallel.variants import DedupExpertTensorParallel, SplitExpertTensorParallel

__all__ = [
    "ExpertParallel",
    "TensorParallel",
    "ExpertTensorParallel",
    "DedupExpertTensorParallel",
    "SplitExpertTensorParallel",
]
