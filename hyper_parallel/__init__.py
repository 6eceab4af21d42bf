"""Expert Tensor Parallelism for Mixture-of-Experts models on MindSpore and PyTorch.

Importing this package imports neither framework. The modules (``GroupedExperts``, ``MoE``, ``FeedForward``,
``TokenChoiceTopKRouter``) and ``DeviceMesh`` are looked up when they are first asked for; they are those of the
platform in use at that moment, see :func:`get_platform`. Type checkers and editors are shown PyTorch's modules, which
take the same arguments as MindSpore's, and for ``DeviceMesh`` what the meshes of both can do.
"""

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor import distribute_module, distribute_tensor
from hyper_parallel.core.expert_parallel import (
    DedupExpertTensorParallel,
    ExpertParallel,
    ExpertTensorParallel,
    MoESequenceParallel,
    SplitExpertTensorParallel,
    TensorParallel,
)
from hyper_parallel.core.parallel_style import ParallelStyle, parallelize, parallelize_module
from hyper_parallel.core.placement_types import Partial, Replicate, Shard
from hyper_parallel.platform import get_platform, set_platform
from hyper_parallel.training import (
    all_finite,
    clip_grad_norm_,
    load_metrics,
    parameter_groups,
    reduce_gradients,
    synchronize_parameters,
)

if TYPE_CHECKING:
    from hyper_parallel.core.types import Mesh as DeviceMesh
    from hyper_parallel.platform.torch.collectives import ops_to_save
    from hyper_parallel.platform.torch.modules import FeedForward, GroupedExperts, MoE, TokenChoiceTopKRouter

__version__ = "0.1.0"

__all__ = [
    "ExpertParallel",
    "TensorParallel",
    "ExpertTensorParallel",
    "DedupExpertTensorParallel",
    "SplitExpertTensorParallel",
    "MoESequenceParallel",
    "ParallelStyle",
    "parallelize_module",
    "parallelize",
    "init_device_mesh",
    "Shard",
    "Replicate",
    "Partial",
    "distribute_tensor",
    "distribute_module",
    "get_platform",
    "set_platform",
    "reduce_gradients",
    "clip_grad_norm_",
    "all_finite",
    "parameter_groups",
    "load_metrics",
    "synchronize_parameters",
    # Of the platform in use:
    "GroupedExperts",
    "MoE",
    "FeedForward",
    "TokenChoiceTopKRouter",
    "DeviceMesh",
    "ops_to_save",
]

_OF_PLATFORM = ("GroupedExperts", "MoE", "FeedForward", "TokenChoiceTopKRouter", "DeviceMesh", "ops_to_save")


def __getattr__(name: str) -> Any:
    if name in _OF_PLATFORM:
        # Not kept: the platform in use may change between two look-ups.
        return get_platform().public_object(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
