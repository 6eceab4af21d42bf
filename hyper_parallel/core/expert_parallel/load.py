"""The load of the experts.

Shape suffixes: E experts.
"""

from typing import Any

from hyper_parallel.core.types import Mesh
from hyper_parallel.platform.platform import Platform

__all__ = ["update_expert_bias"]


def update_expert_bias(platform: Platform, moe: Any, device_mesh: Mesh | None = None) -> None:
    """Move the bias of overloaded experts down and of underloaded ones up, and start to count anew.

    ``bias += rate * sign(mean load - load)`` (Wang et al. 2024, algorithm 1).
    """
    if device_mesh is not None and not platform.is_mesh(device_mesh):
        raise TypeError(
            f"update_expert_bias expects a mesh of the axes that route different tokens, such as mesh['dp', 'ep'], "
            f"got {device_mesh!r}"
        )
    load_E = moe.tokens_per_expert
    groups = [] if device_mesh is None else [device_mesh.get_group(axis) for axis in range(device_mesh.ndim)]
    for group in groups:
        load_E = platform.sum_over_group(load_E, group, "update_expert_bias: sum of the loads")
    load_E = load_E * 1.0
    mean = load_E.sum(0) / load_E.shape[0]
    platform.assign(moe.expert_bias, moe.expert_bias + (mean - load_E).sign() * moe.bias_update_rate)
    platform.assign(moe.tokens_per_expert, load_E * 0.0)
