"""Expert Tensor Parallelism for Mixture-of-Experts models on MindSpore and PyTorch.

Importing this package imports neither framework. Names are resolved when they are first asked for; the modules
(``GroupedExperts``, ``MoE``, ``FeedForward``, ``TokenChoiceTopKRouter``) and ``DeviceMesh`` are those of the platform
in use at that moment, see :func:`get_platform`.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "ExpertParallel": "core.expert_parallel",
    "TensorParallel": "core.expert_parallel",
    "ExpertTensorParallel": "core.expert_parallel",
    "DedupExpertTensorParallel": "core.expert_parallel",
    "SplitExpertTensorParallel": "core.expert_parallel",
    "ParallelStyle": "core.parallel_style",
    "parallelize_module": "core.parallel_style",
    "parallelize": "core.parallel_style",
    "init_device_mesh": "core.device_mesh",
    "Shard": "core.placement_types",
    "Replicate": "core.placement_types",
    "Partial": "core.placement_types",
    "distribute_tensor": "core.dtensor",
    "distribute_module": "core.dtensor",
    "get_platform": "platform",
    "set_platform": "platform",
}
_OF_PLATFORM = ("GroupedExperts", "MoE", "FeedForward", "TokenChoiceTopKRouter", "DeviceMesh")

__all__ = [*_HOME, *_OF_PLATFORM]  # noqa: PLE0604 - names, all strings


def __getattr__(name):
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _OF_PLATFORM:
        # Not kept: the platform in use may change between two look-ups.
        from hyper_parallel.platform import get_platform

        return get_platform().public_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
