"""PyTorch: CPU ranks over gloo, and any device type that torch's collectives and matrix products run on."""

from torch.distributed.tensor.parallel import ParallelStyle as TorchParallelStyle

from hyper_parallel.core.parallel_style import ParallelStyle
from hyper_parallel.platform.torch.platform import TorchPlatform

__all__ = ["PLATFORM"]

PLATFORM = TorchPlatform()

# torch's parallelize_module takes objects of its own base class only; core cannot inherit from it.
TorchParallelStyle.register(ParallelStyle)
