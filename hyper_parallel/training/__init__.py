"""What a training step needs around the layer, for both frameworks; imports neither."""

from hyper_parallel.training.gradients import all_finite, clip_grad_norm_, parameter_groups, reduce_gradients
from hyper_parallel.training.synchronize import synchronize_parameters

__all__ = ["all_finite", "clip_grad_norm_", "parameter_groups", "reduce_gradients", "synchronize_parameters"]
