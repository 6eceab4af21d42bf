"""The contract of dispatching: what a way of travelling must do for a MoE layer.

A MoE layer routes, and then calls, for whatever way its style names:

    arriving     = exchange.start(routing.counts_E, x_TD, scores_TK)
    inputs, trip = exchange.dispatch(x_TD, scores_TK, selected_TK, routing, arriving)
    rows_RD      = experts(*inputs)                      local rows, with counts over the experts of this rank
    y_TD         = exchange.combine(rows_RD, trip)

Shape suffixes: T tokens of this rank, K experts per token, R rows (T * K before they travel; afterwards those of this
rank's experts), E experts, L experts of one rank (E / ep), D model size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Exchange", "LocalInputs", "Places", "Routing"]


class Routing(NamedTuple):
    """The T * K rows that a router made of T tokens, sorted by expert; row t * K + k is token t for its k-th expert.

    Attributes:
        order_R: int64, which row comes i-th when they are sorted by expert; stable.
        inverse_R: int64, its inverse: at which place row i ends up.
        counts_E: int64, rows of each expert.
    """

    order_R: Tensor
    inverse_R: Tensor
    counts_E: Tensor


class LocalInputs(NamedTuple):
    """What the experts of this rank are called with.

    Attributes:
        rows_RD: rows sorted by local expert.
        counts_L: int64, their numbers, made by ``Platform.int_tensor`` where the host knows them.
        scores_R: the score of each row, in the dtype of the router's; None only for bare experts that get none.
    """

    rows_RD: Tensor
    counts_L: Tensor
    scores_R: Tensor | None


@dataclass(frozen=True)
class Places:
    """Where the experts of one module lie.

    Attributes:
        platform: the verbs of the framework.
        num_experts: E.
        ep_mesh: 1-D mesh over which the experts are split; None where one rank holds all.
        tp_mesh: 1-D mesh over which each expert is split; None where one rank holds it whole.
    """

    platform: Platform
    num_experts: int
    ep_mesh: Mesh | None
    tp_mesh: Mesh | None

    @property
    def experts_per_rank(self) -> int:
        """L."""
        return self.num_experts // (self.ep_mesh.size() if self.ep_mesh is not None else 1)


class Exchange(ABC):
    """One way in which tokens travel, bound to the places of one module's experts.

    It keeps nothing of a call: what combine must know of its dispatch is the trip, a frozen value that the layer hands
    from one to the other. So calls may overlap, be repeated by recomputation, or end in an exception.

    Attributes:
        sums_over_tp: whether ``combine`` returns complete sums, and ``dispatch`` complete gradients, over tp. Where it
            is False the layer sums the terms itself, once, on [T, D].
        takes_shares: whether ``dispatch_share`` and ``combine_share`` may take the place of the two in a layer whose
            tp ranks each have a part of the tokens.
    """

    sums_over_tp = False
    takes_shares = False

    def __init__(self, places: Places) -> None:
        self.places = places

    def start(self, counts_E: Tensor, x_TD: Tensor, scores_TK: Tensor) -> Any:
        """Start what can travel before the rows are ready, the counts; its result is the ``arriving`` of dispatch.

        Every rank of the ep group calls this, and nothing else may be asked of the group before dispatch. Tokens and
        scores are given for what they are (dtype, width), on which the ranks must agree.
        """
        return None

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor, routing: Routing, arriving: Any
    ) -> tuple[LocalInputs, Any]:
        """Bring every token to the ranks of its experts.

        Args:
            x_TD: tokens of this rank; those of one tp group hold the same.
            scores_TK: float32 or wider, differentiable. selected_TK: int64, the experts' global ids.
            routing: the same choice, sorted by expert.
            arriving: what ``start`` returned for ``routing.counts_E``.

        Returns:
            the inputs of this rank's experts, and the trip: whatever ``combine`` needs, in a frozen value.
            Differentiable in x and scores. Ranks without tokens, and without rows, take part like any other.
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, trip: Any) -> Tensor:
        """Bring the experts' scored output rows back, and sum those of each token: [T, D], differentiable."""

    def dispatch_share(
        self, x_SD: Tensor, shares: Sequence[int], scores_TK: Tensor, selected_TK: Tensor
    ) -> tuple[LocalInputs, Any]:
        """``dispatch`` where this tp rank has its own tokens only, ``shares[r]`` of rank r; scores and choices
        are those of all, in order of the ranks."""
        raise NotImplementedError

    def combine_share(self, rows_RD: Tensor, trip: Any) -> Tensor:
        """``combine`` for the tokens of this tp rank alone."""
        raise NotImplementedError
