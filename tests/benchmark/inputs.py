"""Weights, tokens and routing of a work, as numpy arrays: the same for every contender and both frameworks.

Shape suffixes: T tokens of one ep coordinate, K experts per token, R = T * K rows, E experts, D model size, H hidden.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.harness.setting import local_part

__all__ = ["Weights", "Batch", "make_weights", "make_batch"]


@dataclass(frozen=True)
class Weights:
    gate_ED: np.ndarray
    w1_EHD: np.ndarray
    w2_EDH: np.ndarray
    w3_EHD: np.ndarray

    def shards(self, work, ep_rank, tp_rank):
        """w1, w2 and w3 of one rank."""
        whole = {"w1": self.w1_EHD, "w2": self.w2_EDH, "w3": self.w3_EHD}
        return {name: local_part(w, name, work.ep, work.tp, ep_rank, tp_rank) for name, w in whole.items()}


@dataclass(frozen=True)
class Batch:
    """What one ep coordinate holds. ``rows_RD`` are its tokens sorted by expert, as the experts layer takes them."""

    tokens_TD: np.ndarray
    rows_RD: np.ndarray
    counts_E: np.ndarray
    grad_TD: np.ndarray
    grad_RD: np.ndarray


@lru_cache(maxsize=1)
def make_weights(shape):
    """Whole weights that keep the size of what goes through them."""
    E, D, H = shape.num_experts, shape.dim, shape.hidden_dim
    draw = np.random.default_rng(0)

    def weight(*sizes):
        values = draw.random(sizes, dtype=np.float32)
        values -= 0.5
        values *= (12 / sizes[-1]) ** 0.5
        return values

    return Weights(weight(E, D), weight(E, H, D), weight(E, D, H), weight(E, H, D))


def make_batch(work, ep_rank, gate_ED):
    """Tokens differ over ep and are the same over tp; each goes to the K experts that the gate prefers."""
    shape, draw = work.shape, np.random.default_rng(100 + ep_rank)
    tokens_TD = draw.standard_normal((work.tokens, shape.dim), dtype=np.float32)
    experts_R = np.argsort(-(tokens_TD @ gate_ED.T), axis=1)[:, : shape.top_k].ravel()
    order_R = np.argsort(experts_R, kind="stable")
    rows_RD = tokens_TD[order_R // shape.top_k]
    return Batch(
        tokens_TD,
        rows_RD,
        np.bincount(experts_R, minlength=shape.num_experts),
        draw.standard_normal(tokens_TD.shape, dtype=np.float32),
        draw.standard_normal(rows_RD.shape, dtype=np.float32),
    )
