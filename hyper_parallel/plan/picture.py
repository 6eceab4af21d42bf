"""The plans as a picture: memory against time, and where time and memory of the best few go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.plan.explain import short_name
from hyper_parallel.plan.search import Plan, Request

__all__ = ["draw", "pareto_front"]

COLOURS = {
    "ExpertParallel": "#1b6ca8",
    "TensorParallel": "#8a5a00",
    "ExpertTensorParallel": "#c0392b",
    "SplitExpertTensorParallel": "#7d3c98",
    "DedupExpertTensorParallel": "#1e8449",
}
MARKERS = {"none": "o", "moe": "s", "full": "^"}
PARTS = {
    "time": ("experts", "elementwise", "dense", "ep", "tp", "dp"),
    "memory": ("parameters", "gradients", "optimizer", "activations", "buffers"),
}
FARTHEST = 5  # Plans that take more than so many times the best's time, or a device's memory, are not on the map.
SHADES = ("#34495e", "#95a5a6", "#d5b942", "#1b6ca8", "#c0392b", "#1e8449")


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that no other beats in both time and memory, the fastest first."""
    front: list[Plan] = []
    for one in sorted(plans, key=lambda p: (p.time.total, p.memory.total)):
        if not front or one.memory.total < front[-1].memory.total:
            front.append(one)
    return front


def draw(request: Request, plans: Sequence[Plan], path: str | Path, best: int = 6) -> None:
    """Write the picture; matplotlib must be installed."""
    from matplotlib.figure import Figure

    plans = [one for one in plans if one.is_plain and not one.notes] or [one for one in plans if one.is_plain]
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    model = request.model
    where = f"{model.name} on {request.ranks} ranks of {request.cluster.name}"
    figure.suptitle(f"{where}: {request.tokens:,} tokens a step, {request.dtype}")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _map(left, request, plans)
    shown = _distinct(plans, best)
    labels = [
        f"dp{p.dp} ep{p.ep} tp{p.tp}\n{short_name(p.style)}" + f", re {p.recompute}" * p.recomputes for p in shown
    ]
    _bars(
        middle,
        labels,
        [[getattr(p.time, part) for part in PARTS["time"]] for p in shown],
        PARTS["time"],
        "seconds a step",
    )
    sizes = [[getattr(p.memory, part) / 1e9 for part in PARTS["memory"]] for p in shown]
    _bars(right, labels, sizes, PARTS["memory"], "GB a rank")
    right.set_yticklabels([])
    right.axvline(request.cluster.memory_bytes / 1e9, color="black", linestyle="--", linewidth=1)
    figure.savefig(path, dpi=110)


def _distinct(plans: Sequence[Plan], number: int) -> list[Plan]:
    """The best plan of each mesh, and the best of each style, up to a number."""
    shown: list[Plan] = []
    for key in (lambda p: p.style, lambda p: (p.ep, p.tp)):
        for one in plans:
            if len(shown) < number and all(key(one) != key(other) for other in shown):
                shown.append(one)
    return sorted(shown, key=plans.index)


def _map(axes: Any, request: Request, plans: Sequence[Plan]) -> None:
    limit = request.cluster.memory_bytes
    shown = [p for p in plans if p.time.total <= FARTHEST * plans[0].time.total and p.memory.total <= FARTHEST * limit]
    shown = shown or list(plans)
    for style, colour in COLOURS.items():
        for recompute, marker in MARKERS.items():
            points = [_point(p) for p in shown if (p.style, p.recompute) == (style, recompute)]
            if points:
                axes.scatter(*zip(*points), s=26, color=colour, marker=marker, alpha=0.75, linewidths=0)
        axes.scatter([], [], s=26, color=colour, label=style)
    axes.plot(*zip(*map(_point, pareto_front(shown))), color="black", linewidth=1, label="Pareto front", zorder=0)
    axes.axhline(limit / 1e9, color="black", linestyle="--", linewidth=1, label="memory of a device")
    axes.annotate(
        "best", _point(plans[0]), textcoords="offset points", xytext=(-12, -18), arrowprops={"arrowstyle": "-"}
    )
    axes.set(xscale="log", yscale="log", xlabel="seconds a step", ylabel="GB a rank")
    axes.set_title("recompute: none (dot), moe (square), full (triangle)", fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="minor", labelsize=7)
    axes.margins(y=0.12)
    # Beside the points, which lie anywhere.
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.11))
    axes.grid(alpha=0.3, which="both")


def _point(one: Plan) -> tuple[float, float]:
    return one.time.total, one.memory.total / 1e9


def _bars(
    axes: Any, labels: Sequence[str], values: Sequence[Sequence[float]], parts: Sequence[str], title: str
) -> None:
    places = range(len(labels), 0, -1)
    starts = [0.0] * len(labels)
    for part, shade, widths in zip(parts, SHADES, zip(*values)):
        axes.barh(places, widths, left=starts, color=shade, label=part)
        starts = [start + width for start, width in zip(starts, widths)]
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel(title)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
