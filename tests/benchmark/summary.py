"""From what the ranks measured to the numbers that are shown."""

import numpy as np

__all__ = ["TOLERANCE", "Disagreement", "summarize", "mindspore_summary"]

# Relative error at which ours and TorchTitan's are the same function; bf16 has 8 bits, and sums run in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
PHASES = ("forward", "backward", "both")


class Disagreement(Exception):
    """Two contenders that do not compute the same must not be compared."""


def summarize(work, per_rank):
    """Numbers of one work from the answers of ``torch_cases.compare``, one per rank.

    Ratios are taken within each repetition, and given as [lower quartile, median, upper quartile].
    """
    differences = {value: max(rank["differences"][value] for rank in per_rank) for value in per_rank[0]["differences"]}
    wrong = {name: value for name, value in differences.items() if not value < TOLERANCE[work.dtype]}
    if wrong:
        raise Disagreement(f"{work}: results differ from ours by {wrong}, so times mean nothing")
    names = list(per_rank[0]["spans"])
    wall = {name: _wall([rank["spans"][name] for rank in per_rank]) for name in names}
    processor = {name: _processor([rank["spans"][name] for rank in per_rank]) for name in names}
    pairs = [(name, "floor") for name in names if name != "floor"]
    pairs += [(name, "titan") for name in names if name not in ("titan", "floor") and "titan" in names]
    return {
        "layer": work.layer,
        "dtype": work.dtype,
        "mesh": [work.ep, work.tp],
        "differences": differences,
        "milliseconds": {name: _medians(wall[name]) for name in names},
        "ratios": {f"{a} / {b}": _ratios(wall[a], wall[b]) for a, b in pairs},
        "processor_ratios": {f"{a} / {b}": _ratios(processor[a], processor[b]) for a, b in pairs},
        "memory": {
            name: {kind: max(rank["memory"][name][kind] for rank in per_rank) for kind in ("kept", "peak")}
            for name in per_rank[0]["memory"]
        },
        "traffic": {
            name: {
                axis: [float(np.mean([rank["traffic"][name][axis][i] for rank in per_rank])) for i in (0, 1)]
                for axis in per_rank[0]["traffic"][name]
            }
            for name in per_rank[0]["traffic"]
        },
        "host_copies": per_rank[0]["host_copies"],
        "notes": per_rank[0]["notes"],
        "where": {
            name: {kind: float(np.mean([rank["where"][name][kind] for rank in per_rank])) for kind in kinds}
            for name, kinds in per_rank[0]["where"].items()
        },
    }


def mindspore_summary(rounds):
    """Ratios of MindSpore's ours to torch's ours and to MindSpore's floor; ``rounds`` of (torch, MindSpore) answers."""
    torch_wall, ours_wall, floor_wall = ([] for _ in range(3))
    for of_torch, of_mindspore in rounds:
        torch_wall.append(_wall(of_torch))
        ours_wall.append(_wall_with_both([rank["ours"] for rank in of_mindspore]))
        floor_wall.append(_wall_with_both([rank["floor"] for rank in of_mindspore]))
    of_torch, ours, floor = (
        {phase: np.concatenate([wall[phase] for wall in walls]) for phase in ("forward", "both")}
        for walls in (torch_wall, ours_wall, floor_wall)
    )
    return {
        "milliseconds": {"torch": _medians(of_torch), "mindspore": _medians(ours), "mindspore floor": _medians(floor)},
        "ratios": {"mindspore / torch": _ratios(ours, of_torch), "mindspore / its floor": _ratios(ours, floor)},
    }


def _wall(spans_per_rank):
    """Seconds of every repetition, from the first rank's start to the last one's end."""
    spans = np.array(spans_per_rank)  # [rank, repetition, 6]
    forward = spans[:, :, 1].max(0) - spans[:, :, 0].min(0)
    backward = spans[:, :, 3].max(0) - spans[:, :, 2].min(0)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def _wall_with_both(spans_per_rank):
    spans = np.array(spans_per_rank)  # [rank, repetition, 6]: start, end, processor time; of forward, then of both
    return {
        "forward": spans[:, :, 1].max(0) - spans[:, :, 0].min(0),
        "both": spans[:, :, 4].max(0) - spans[:, :, 3].min(0),
    }


def _processor(spans_per_rank):
    """Processor seconds of every repetition, of all ranks together."""
    seconds = np.array(spans_per_rank)[:, :, 4:].sum(0)
    return {"forward": seconds[:, 0], "backward": seconds[:, 1], "both": seconds.sum(1)}


def _medians(seconds):
    return {phase: 1e3 * float(np.median(values)) for phase, values in seconds.items()}


def _ratios(a, b):
    return {phase: np.percentile(a[phase] / b[phase], (25, 50, 75)).tolist() for phase in a}
