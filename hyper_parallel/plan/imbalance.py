"""How much more than its share the busiest ep rank gets, from recorded loads or from a Zipf exponent.

A step is as slow as its slowest rank. A recorded load is counts of tokens per expert and layer, as a MoE layer has them
in ``tokens_per_expert``. E experts, ep ranks, rank r owns experts r E/ep to (r + 1) E/ep - 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Imbalance", "read_load", "zipf_load", "imbalance_of"]

PLACEMENTS = 64  # random placements of experts over which a Zipf load is averaged


@dataclass(frozen=True)
class Imbalance:
    """Rows at the busiest rank, relative to the mean.

    Attributes:
        time: mean over layers of the busiest rank of each: every layer waits for its own.
        memory: of the rank that is busiest over all layers together: what is kept adds up on one rank.
    """

    time: float = 1.0
    memory: float = 1.0


def read_load(source: str | Path | Mapping[str, Any] | Sequence, num_experts: int) -> np.ndarray:
    """Counts [layers, E] from a JSON file or its content.

    Accepted are a list of lists, one list, an object of lists by layer's name, and either of them under "counts",
    "tokens_per_expert" or "load".
    """
    found = json.loads(Path(source).read_text(encoding="utf-8")) if isinstance(source, str | Path) else source
    while isinstance(found, Mapping):
        named = next((found[name] for name in ("counts", "tokens_per_expert", "load") if name in found), None)
        found = list(found.values()) if named is None else named
    try:
        counts = np.atleast_2d(np.asarray(found, np.float64))
    except ValueError:
        raise ValueError("a load must hold one list of counts per layer, all of the same length") from None
    if counts.ndim != 2 or counts.shape[1] != num_experts:
        raise ValueError(f"a load must have one count for each of {num_experts} experts, got shape {counts.shape}")
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.sum(1).all():
        raise ValueError("counts of a load must be finite and not negative, and no layer may be without any")
    return counts


def zipf_load(exponent: float, num_experts: int, top_k: int) -> np.ndarray:
    """Loads [placements, E] in which the i-th most popular expert is chosen as often as 1 / i**exponent.

    No token can choose an expert twice, so no expert gets more than one row per token: what is above goes to the others
    in their proportion. Where the popular experts lie is drawn anew for each row of the result.
    """
    if not exponent >= 0:
        raise ValueError(f"a Zipf exponent must be at least 0, got {exponent}")
    wanted = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    load = top_k * wanted / wanted.sum()
    while (over := load > 1 + 1e-12).any():
        load[over] = 1.0
        rest = load < 1
        load[rest] *= (top_k - (~rest).sum()) / load[rest].sum()
    draw = np.random.default_rng(0)
    return np.stack([draw.permutation(load) for _ in range(PLACEMENTS)])


def imbalance_of(counts_LE: np.ndarray, ep: int, one_placement: bool = True) -> Imbalance:
    """The busiest of ep ranks.

    Args:
        one_placement: the rows are layers of one model; otherwise unrelated placements, whose mean is taken.
    """
    of_ranks = counts_LE.reshape(len(counts_LE), ep, -1).sum(2)
    relative = of_ranks / of_ranks.mean(1, keepdims=True)
    time = float(relative.max(1).mean())
    return Imbalance(time, float(relative.mean(0).max()) if one_placement else time)
