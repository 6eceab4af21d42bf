"""What one rank hands to collectives in a step, over all layers, and what of it leaves the rank on which link."""

from __future__ import annotations

from hyper_parallel.plan.cluster import Cluster
from hyper_parallel.plan.layer import Collective, MoELayer, collectives
from hyper_parallel.plan.memory import Optimizer
from hyper_parallel.plan.model import Model

__all__ = ["Traffic", "step_collectives", "traffic_of", "on_links", "strides"]

Traffic = dict[str, dict[str, int]]


def strides(ep: int, tp: int) -> dict[str, int]:
    """Distance of neighbours in a group of each axis: tp varies fastest, then ep, then dp."""
    return {"tp": 1, "ep": tp, "dp": tp * ep, "dp x ep": tp}


def step_collectives(
    model: Model, layer: MoELayer, dp: int, recompute: str, optimizer: Optimizer, zero: int
) -> list[tuple[Collective, int, int]]:
    """(collective, how often, ranks of its group) of one rank and step."""
    degrees = {"ep": layer.ep, "tp": layer.tp, "dp": dp, "dp x ep": dp * layer.ep}
    found = [(one, model.num_moe_layers) for one in collectives(layer)]
    if recompute != "none":
        found += [(again, model.num_moe_layers) for again in _recomputed(layer, recompute)]
    found += [(one, 1) for one in _gradients(model, layer, dp, optimizer, zero)]
    return [(one, times, degrees[one.axis]) for one, times in found]


def _recomputed(layer: MoELayer, recompute: str) -> list[Collective]:
    """The forward's collectives a second time, but for the last sum over tp: what it would give, nothing needs."""
    again = [one for one in collectives(layer) if one.when == "forward"]
    sums = [one for one in again if one.what == "sums"]
    return [
        Collective(one.axis, "recompute", one.kind, one.what, one.payload, one.formula)
        for one in again
        if not sums or one is not sums[-1]
    ]


def _gradients(model: Model, layer: MoELayer, dp: int, optimizer: Optimizer, zero: int) -> list[Collective]:
    """The sums of gradients over the ranks that see different tokens: dp for experts, dp x ep for everything else."""
    b = layer.itemsize
    parts = {
        ("dp", "expert_gradients"): model.expert_parameters(layer.ep, layer.tp),
        ("dp x ep", "other_gradients"): model.dense_parameters() + model.shared_parameters(layer.tp),
    }
    degrees = {"dp": dp, "dp x ep": dp * layer.ep}
    found = []
    for (axis, what), number in parts.items():
        if degrees[axis] == 1:
            continue
        size = number * optimizer.gradient_bytes(b)
        kind = "all-reduce" if zero == 0 else "reduce-scatter"
        found.append(Collective(axis, "step", kind, what, size, "gradients"))
        if zero:
            share = -(-number // degrees[axis]) * b
            gathered = what.replace("gradients", "parameters")
            # ZeRO 1 and 2 gather the new parameters once; ZeRO 3 gathers them forward and again backward.
            found += [Collective(axis, "step", "all-gather", gathered, share, "parameters / ranks")] * (
                2 if zero == 3 else 1
            )
    return found


def traffic_of(found: list[tuple[Collective, int, int]], layer: MoELayer, dp: int, cluster: Cluster) -> Traffic:
    """By axis: bytes handed over by what they are and when; ``inside`` and ``between``: bytes that leave the rank."""
    total: dict[str, dict[str, int]] = {
        "ep": {"forward_rows": 0, "backward_rows": 0},
        "tp": {"forward_sums": 0, "backward_sums": 0},
        "dp": {},
    }
    for axis in total.values():
        axis.update(inside=0, between=0)
    distance = strides(layer.ep, layer.tp)
    for one, times, size in found:
        axis = total["dp" if one.axis.startswith("dp") else one.axis]
        name = one.what if one.when == "step" else f"{one.when}_{one.what}"
        axis[name] = axis.get(name, 0) + times * one.payload
        for link, leaving in on_links(one, size, distance[one.axis], cluster).items():
            axis[link] += times * leaving
    return {axis: dict(sorted(found.items())) for axis, found in total.items()}


def on_links(one: Collective, size: int, stride: int, cluster: Cluster) -> dict[str, int]:
    """Bytes of a collective that leave this rank inside its host, and between hosts.

    An all-to-all sends equal parts to all ranks. An all-reduce is a ring inside each host and one between hosts, on
    what each rank of a host is responsible for; a reduce-scatter and an all-gather are half of it each.
    """
    inside = cluster.ranks_inside(stride, size)
    hosts = -(-size // inside)
    if one.kind == "all-to-all":
        return {"inside": one.payload * (inside - 1) // size, "between": one.payload * (size - inside) // size}
    whole = one.payload * size if one.kind == "all-gather" else one.payload
    passes = 2 if one.kind == "all-reduce" else 1
    within = passes * whole * (inside - 1) // inside
    across = passes * (whole // inside) * (hosts - 1) // hosts
    return {"inside": within, "between": across}
