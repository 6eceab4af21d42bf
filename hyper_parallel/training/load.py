"""How evenly the experts of a model are used, for any logger."""

from typing import Any

import numpy as np

from hyper_parallel.core.types import Mesh, Module
from hyper_parallel.platform import get_platform
from hyper_parallel.training.span import Span

__all__ = ["load_metrics"]


def load_metrics(module: Module, mesh: Mesh | None = None, reset: bool = False) -> dict[str, float]:
    """The load of every MoE layer since the counting began, over all ranks.

    Counts are those of ``MoE.tokens_per_expert``: rows (tokens times experts per token) of backward passes, so that
    micro-batches add up, recompute counts once and evaluation not at all. ``update_expert_bias`` starts the counting
    anew: call this before it. All layers travel in one collective, and the host waits for it.

    Args:
        module: the model, or a layer.
        mesh: the axes whose ranks see different tokens, such as ``mesh["dp", "ep"]``, never tp; None on one device.
        reset: start to count anew, for models that do not call ``update_expert_bias``.

    Returns:
        ``{"moe/<name of the layer>/<metric>": value}`` with the metrics ``load_max``, ``load_mean`` and ``load_min``
        (rows of the busiest, the average and the idlest expert), ``load_cv`` (standard deviation over mean; 0 is even,
        and also what an empty count gives) and ``dead_experts`` (their number). The name of a layer is its name in
        ``module``; that of ``module`` itself is left out: ``"moe/load_max"``.
    """
    platform = get_platform(module)
    layers = {name: each for name, each in platform.named_modules(module) if hasattr(each, "tokens_per_expert")}
    if not layers:
        return {}
    counters = [layer.tokens_per_expert for layer in layers.values()]
    metrics: dict[str, float] = {}
    for name, counts in zip(layers, _summed(platform, counters, mesh)):
        prefix = f"moe/{name}" if name else "moe"
        mean = float(np.mean(counts))
        metrics |= {
            f"{prefix}/load_max": float(max(counts)),
            f"{prefix}/load_mean": mean,
            f"{prefix}/load_min": float(min(counts)),
            f"{prefix}/load_cv": float(np.std(counts)) / mean if mean else 0.0,
            f"{prefix}/dead_experts": float(sum(count == 0 for count in counts)),
        }
    if reset:
        for counter in counters:
            platform.assign(counter, counter * 0)
    return metrics


def _summed(platform: Any, counters: list[Any], mesh: Any) -> list[list[int]]:
    """The counters' values summed over the mesh, as lists of ints."""
    verbs, group = platform.gradients(), None
    if mesh is not None:
        span = Span.of(platform, mesh)
        group = span.group(span.axes) if span.axes else None
    copies = verbs.local_values(counters)
    if group is not None:
        copies = [verbs.zeros_like(copy) + copy for copy in copies]  # the sum may be written into them
        copies = verbs.sum_flat(copies, group, 1, "load_metrics: sum of the loads")
    return platform.to_host(*copies)
