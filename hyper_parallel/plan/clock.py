"""How long a step takes on the slowest rank: products, elementwise work, dense layers, and what the links take.

Every collective of the library is waited for where it is called, so nothing is hidden behind something else: all of the
links' time is exposed. Products are bound by flops or by memory, whichever takes longer. Letters as in ``layer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.plan.cluster import Cluster
from hyper_parallel.plan.layer import Collective, MoELayer, flops
from hyper_parallel.plan.model import Model
from hyper_parallel.plan.traffic import on_links, strides

__all__ = ["Time", "collective_seconds", "dense_flops", "experts_seconds", "time_of"]

# Passes over memory of one MoE layer beside products and links, in bytes / b: of rows [R, D], of hidden rows
# [R, H/tp], of tokens [T, D], of the rank's expert weights. Counted in the operators that a layer calls on an Ascend
# device, scores inside the experts, mesh (2, 2).
PASSES = {"forward": (7, 13, 4, 0), "backward": (10, 28, 7, 2)}


@dataclass(frozen=True)
class Time:
    """Seconds of one step. ``total`` is their sum; ``exposed`` is what the links take of it."""

    experts: float
    elementwise: float
    dense: float
    ep: float
    tp: float
    dp: float

    @property
    def exposed(self) -> float:
        return self.ep + self.tp + self.dp

    @property
    def total(self) -> float:
        return self.experts + self.elementwise + self.dense + self.exposed


def experts_seconds(layer: MoELayer, cluster: Cluster, dtype: str) -> dict[str, float]:
    """Products of the routed experts of one layer, forward and backward.

    Memory traffic of the three products forward: rows are read twice and written once, hidden rows written twice and
    read once, weights read once; backward twice that, and the weights' gradients written.
    """
    rows, width = layer.arriving_rows, layer.hidden_dim // layer.tp
    weights = 3 * (layer.num_experts // layer.ep) * layer.dim * width
    moved = (3 * rows * (layer.dim + width) + weights) * layer.itemsize
    speed = cluster.compute[dtype] * cluster.efficiency
    forward, backward = flops(layer)
    return {
        "forward": max(forward / speed, moved / cluster.memory_bandwidth),
        "backward": max(backward / speed, (2 * moved + weights * layer.itemsize) / cluster.memory_bandwidth),
    }


def elementwise_seconds(layer: MoELayer, cluster: Cluster) -> dict[str, float]:
    """Everything between the products and the links of one layer: passes over memory."""
    rows, width, tokens = layer.arriving_rows, layer.hidden_dim // layer.tp, layer.num_tokens
    weights = 3 * (layer.num_experts // layer.ep) * layer.dim * width
    sizes = rows * layer.dim, rows * width, tokens * layer.dim, weights
    return {
        when: sum(n * size for n, size in zip(passes, sizes)) * layer.itemsize / cluster.memory_bandwidth
        for when, passes in PASSES.items()
    }


def dense_flops(model: Model, layer: MoELayer, sequence: int) -> dict[str, int]:
    """Flops forward of one rank: of all layers outside the routed experts, and of the output ("head").

    Attention is causal: a token meets half of its sequence. All tp ranks compute the same, but for shared experts, and
    for the output under sequence parallel.
    """
    tokens, attention = layer.num_tokens, model.attention
    of_token = 2 * attention.matrix_parameters + 2 * attention.score_width * min(sequence, tokens) // 2
    of_layers = model.num_layers * of_token + model.num_dense_layers * 6 * model.dim * model.dense_hidden_dim
    of_moe = 2 * model.dim * model.num_experts + 6 * model.dim * model.shared_hidden_dim // layer.tp
    return {
        "layers": tokens * (of_layers + model.num_moe_layers * of_moe),
        "moe": tokens * model.num_moe_layers * of_moe,
        "head": layer.own_tokens * 2 * model.dim * model.vocab_size,
    }


def collective_seconds(one: Collective, size: int, stride: int, cluster: Cluster) -> float:
    """One collective: what leaves the rank inside its host and between hosts, each over its own link.

    The two go at the same time in an all-to-all, after each other in a sum. Messages of an all-to-all start together,
    so the latency of a link counts once; in a sum once for every step of the ring, or for every round of a tree.
    """
    leaving = on_links(one, size, stride, cluster)
    inside = cluster.ranks_inside(stride, size)
    others = {"inside": inside - 1, "between": -(-size // inside) - 1}
    passes = 2 if one.kind == "all-reduce" else 1
    took = []
    for where, link in (("inside", cluster.inside), ("between", cluster.between)):
        if others[where]:
            messages = 1 if one.kind == "all-to-all" else _rounds(others[where], passes)
            took.append(leaving[where] / link.speed(others[where]) + link.latency * messages)
    return max(took, default=0.0) if one.kind == "all-to-all" else sum(took)


def _rounds(steps: int, passes: int) -> int:
    """Steps of a ring over so many others, or rounds of a tree, which backends take for large groups."""
    return passes * min(steps, 2 * steps.bit_length())


def time_of(
    model: Model,
    layer: MoELayer,
    found: Iterable[tuple[Collective, int, int]],
    cluster: Cluster,
    dtype: str,
    sequence: int,
    recompute: str,
) -> Time:
    """Seconds of one step of the whole model on the slowest rank."""
    number, again = model.num_moe_layers, 0 if recompute == "none" else 1
    experts, between = experts_seconds(layer, cluster, dtype), elementwise_seconds(layer, cluster)
    dense = dense_flops(model, layer, sequence)
    repeated = {"none": 0, "moe": dense["moe"], "full": dense["layers"]}[recompute]
    links = {"ep": 0.0, "tp": 0.0, "dp": 0.0}
    distance = strides(layer.ep, layer.tp)
    for one, times, size in found:
        axis = "dp" if one.axis.startswith("dp") else one.axis
        links[axis] += times * collective_seconds(one, size, distance[one.axis], cluster)
    return Time(
        experts=number * ((1 + again) * experts["forward"] + experts["backward"]),
        elementwise=number * ((1 + again) * between["forward"] + between["backward"]),
        dense=(3 * (dense["layers"] + dense["head"]) + repeated) / (cluster.compute[dtype] * cluster.efficiency),
        **links,
    )
