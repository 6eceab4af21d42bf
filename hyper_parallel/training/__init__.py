"""What a training step needs around the layer, for both frameworks; imports neither.

``TrainOneStepCell``, the step that ``mindspore.train.Model`` takes, is MindSpore's alone and looked up when asked for.
"""

import importlib
from typing import Any

from hyper_parallel.training.gradients import all_finite, clip_grad_norm_, parameter_groups, reduce_gradients
from hyper_parallel.training.load import load_metrics
from hyper_parallel.training.synchronize import synchronize_parameters

__all__ = [
    "all_finite",
    "clip_grad_norm_",
    "load_metrics",
    "parameter_groups",
    "reduce_gradients",
    "synchronize_parameters",
]


def __getattr__(name: str) -> Any:
    if name == "TrainOneStepCell":
        return importlib.import_module("hyper_parallel.platform.mindspore.training").TrainOneStepCell
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
