"""Experts over devices: the styles, the token exchange and the arithmetic of the MoE layer."""

from hyper_parallel.core.expert_parallel.expert_parallel import ExpertParallel, ExpertTensorParallel, TensorParallel

__all__ = ["ExpertParallel", "TensorParallel", "ExpertTensorParallel"]
