"""One row per token and expert: each is sent to the rank that owns its expert, and its output back.

The orders of received rows, for P = 2 ranks and L = 2 local experts a, b:

    rank-major     a0 a0 b0 | a1 b1 b1     as they arrive: by source rank, then by expert
    expert-major   a0 a0 a1 | b0 b1 b1     as the experts take them: by expert, then by source rank

Shape suffixes: those of ``base``, and P ranks of the ep group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.agreement import Sending, agreed_counts, described, ranks_of
from hyper_parallel.core.expert_parallel.checks import check_counts
from hyper_parallel.core.expert_parallel.exchange.base import Exchange, LocalInputs, Routing
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Arriving, Platform

__all__ = [
    "RowsExchange",
    "RowsTravel",
    "expert_major_order",
    "inverse_order",
    "return_rows",
    "send_rows",
    "splits_by_rank",
    "start_counts",
]


@dataclass(frozen=True)
class RowsTravel:
    """What :func:`return_rows` must know of the :func:`send_rows` that it undoes.

    Attributes:
        send_splits: rows this rank sent to each rank of the group.
        recv_splits: rows this rank received from each.
        order_R: int64 tensor, positions in rank-major order of the rows in expert-major order; None if both agree.
        inverse_R: its inverse.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None


@dataclass(frozen=True)
class _Trip:
    routing: Routing
    top_k: int
    travel: RowsTravel | None


class RowsExchange(Exchange):
    """The exact exchange: T * K rows leave, and as many come back. With one ep rank they are only sorted."""

    def start(self, counts_E: Tensor, x_TD: Tensor, scores_TK: Tensor) -> Arriving | None:
        platform, ep_mesh = self.places.platform, self.places.ep_mesh
        if ep_mesh is None:
            return None
        return start_counts(platform, counts_E, Sending.of(platform, x_TD, scores_TK), ep_mesh)

    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor, routing: Routing, arriving: Arriving | None
    ) -> tuple[LocalInputs, _Trip]:
        platform = self.places.platform
        num_tokens, top_k = scores_TK.shape
        order_R, inverse_R, counts_E = routing
        rows_RD = platform.permute(x_TD, order_R, inverse_R, copies=top_k)
        scores_R = platform.permute(scores_TK.reshape((num_tokens * top_k,)), order_R, inverse_R)
        inputs, travel = send_rows(platform, rows_RD, counts_E, scores_R, self.places.ep_mesh, arriving)
        return inputs, _Trip(routing, top_k, travel)

    def combine(self, rows_RD: Tensor, trip: _Trip) -> Tensor:
        platform = self.places.platform
        rows_RD = return_rows(platform, rows_RD, trip.travel, self.places.ep_mesh)
        return platform.unpermute(rows_RD, trip.routing.order_R, trip.routing.inverse_R, trip.top_k)


def splits_by_rank(counts_E: npt.ArrayLike, num_ranks: int) -> tuple[int, ...]:
    """Rows per rank for counts per expert: rank r owns experts r*L to (r+1)*L - 1."""
    return tuple(int(n) for n in np.asarray(counts_E, np.int64).reshape(num_ranks, -1).sum(1))


def expert_major_order(recv_counts_PL: npt.ArrayLike) -> np.ndarray:
    """Positions (int64 [R]) in rank-major order of the rows in expert-major order.

    Args:
        recv_counts_PL: rows received from each rank for each local expert.
    """
    counts_PL = np.asarray(recv_counts_PL, np.int64)
    starts_PL = (np.cumsum(counts_PL) - counts_PL.ravel()).reshape(counts_PL.shape)
    lengths = counts_PL.T.ravel()
    ends = np.cumsum(lengths)
    # Row i of the result lies in the piece (expert, rank) that i falls in, at i minus that piece's first row.
    return np.repeat(starts_PL.T.ravel() - (ends - lengths), lengths) + np.arange(lengths.sum())


def inverse_order(order_R: np.ndarray) -> np.ndarray:
    """The permutation that undoes ``order_R``: ``inverse[order[i]] = i``."""
    inverse_R = np.empty_like(order_R)
    inverse_R[order_R] = np.arange(len(order_R))
    return inverse_R


def start_counts(platform: Platform, counts_E: Tensor, sending: Sending, ep_mesh: Mesh) -> Arriving:
    """Start step 1 of :func:`send_rows`, to do something else while it runs."""
    meant = described(platform, counts_E.reshape((ep_mesh.size(), -1)), sending)
    name = f"dispatch: all-to-all of counts over {axis_name(ep_mesh)}"
    return platform.start_counts_exchange(meant, ep_mesh.get_group(), name, also=(counts_E,))


def send_rows(
    platform: Platform,
    x_RD: Tensor,
    num_tokens_per_expert_E: Tensor,
    scores_R: Tensor | None,
    ep_mesh: Mesh | None,
    arriving: Arriving | None = None,
) -> tuple[LocalInputs, RowsTravel | None]:
    """Bring each row to the rank that owns its expert.

    1. The counts go to the ranks they are meant for, with what kind of rows this rank sends; what arrives says how many
       rows will come from where, and whether all ranks mean the same.
    2. Both lists of counts reach the host in one copy.
    3. Rows (and scores) are exchanged.
    4. They are reordered from rank-major to expert-major.

    Args:
        x_RD: rows sorted by global expert id.
        num_tokens_per_expert_E: int64 counts of those rows.
        scores_R: one score per row, or None.
        ep_mesh: 1-D mesh over which the experts lie; nothing moves where it is None or one rank.
        arriving: what :func:`start_counts` returned for these counts, if step 1 is under way.

    Returns:
        the inputs of this rank's experts, and what :func:`return_rows` needs; None where nothing moved.
    """
    if ep_mesh is None or ep_mesh.size() == 1:
        return LocalInputs(x_RD, num_tokens_per_expert_E, scores_R), None
    if arriving is None:
        arriving = start_counts(platform, num_tokens_per_expert_E, Sending.of(platform, x_RD, scores_R), ep_mesh)
    counts_E, arrived = arriving.to_host()
    if not platform.on_host(num_tokens_per_expert_E):
        check_counts(counts_E, x_RD.shape[0])
    recv_counts_PL = agreed_counts(arrived, ep_mesh.size(), ranks_of(ep_mesh))

    travel, counts_L = _plan(platform, counts_E, recv_counts_PL, like=x_RD)
    rows = _send(platform, x_RD, travel, ep_mesh, "rows")
    scores = None if scores_R is None else _send(platform, scores_R, travel, ep_mesh, "scores")
    return LocalInputs(rows, counts_L, scores), travel


def return_rows(platform: Platform, y_RD: Tensor, travel: RowsTravel | None, ep_mesh: Mesh | None) -> Tensor:
    """Bring each row that the experts returned back to its source: reorder, then exchange with the splits swapped."""
    if travel is None or ep_mesh is None:
        return y_RD
    if y_RD.shape[0] != sum(travel.recv_splits):
        raise ValueError(f"the experts returned {y_RD.shape[0]} rows for {sum(travel.recv_splits)} that went in")
    if travel.order_R is not None:
        y_RD = platform.permute(y_RD, travel.inverse_R, travel.order_R)
    name = f"combine: all-to-all of rows over {axis_name(ep_mesh)}"
    return platform.all_to_all_rows(y_RD, travel.recv_splits, travel.send_splits, ep_mesh.get_group(), name)


def _plan(
    platform: Platform, counts_E: Sequence[int], recv_counts_PL: np.ndarray, like: Tensor
) -> tuple[RowsTravel, Tensor]:
    """The travel, and the counts of this rank's experts: one copy to the device."""
    num_ranks, num_local_experts = recv_counts_PL.shape
    splits = splits_by_rank(counts_E, num_ranks), tuple(int(n) for n in recv_counts_PL.sum(1))
    if num_local_experts == 1:  # the two orders agree
        return RowsTravel(*splits), platform.int_tensor(recv_counts_PL.sum(0), like)
    order = expert_major_order(recv_counts_PL)
    arrays = order, inverse_order(order), recv_counts_PL.sum(0)
    order_R, inverse_R, counts_L = platform.int_tensors(arrays, like)
    return RowsTravel(*splits, order_R, inverse_R), counts_L


def _send(platform: Platform, values_R: Tensor, travel: RowsTravel, ep_mesh: Mesh, what: str) -> Tensor:
    name = f"dispatch: all-to-all of {what} over {axis_name(ep_mesh)}"
    values_R = platform.all_to_all_rows(values_R, travel.send_splits, travel.recv_splits, ep_mesh.get_group(), name)
    if travel.order_R is None:
        return values_R
    return platform.permute(values_R, travel.order_R, travel.inverse_R)
