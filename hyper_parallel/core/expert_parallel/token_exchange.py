"""Moving rows to the ranks that own their experts, and back.

Shape suffixes: R rows, E experts (global), L experts of one rank (E / ep), P ranks of the ep group, D model size.

The two orders of received rows, for P = 2 ranks and L = 2 local experts a, b:

    rank-major     a0 a0 b0 | a1 b1 b1     as they arrive: by source rank, then by expert
    expert-major   a0 a0 a1 | b0 b1 b1     as the experts take them: by expert, then by source rank
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.expert_parallel.checks import check_counts

__all__ = [
    "TokenExchange",
    "dispatch",
    "combine",
    "start_counts",
    "splits_by_rank",
    "expert_major_order",
    "inverse_order",
]


@dataclass(frozen=True)
class TokenExchange:
    """What combine must know of the dispatch that it undoes.

    Attributes:
        send_splits: rows this rank sent to each rank of the group.
        recv_splits: rows this rank received from each.
        order_R: int64 tensor, positions in rank-major order of the rows in expert-major order; None if both agree.
        inverse_R: its inverse.
    """

    send_splits: tuple
    recv_splits: tuple
    order_R: Any = None
    inverse_R: Any = None


def splits_by_rank(counts_E, num_ranks):
    """Rows per rank for counts per expert: rank r owns experts r*L to (r+1)*L - 1."""
    return tuple(int(n) for n in np.asarray(counts_E, np.int64).reshape(num_ranks, -1).sum(1))


def expert_major_order(recv_counts_PL):
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


def inverse_order(order_R):
    """The permutation that undoes ``order_R``: ``inverse[order[i]] = i``."""
    inverse_R = np.empty_like(order_R)
    inverse_R[order_R] = np.arange(len(order_R))
    return inverse_R


def start_counts(platform, num_tokens_per_expert_E, ep_mesh):
    """Start step 1 of :func:`dispatch`, to do something else while it runs."""
    name = "dispatch: all-to-all of counts over ep"
    return platform.start_counts_exchange(num_tokens_per_expert_E, ep_mesh.get_group(), name)


def dispatch(platform, x_RD, num_tokens_per_expert_E, scores_R, ep_mesh, arriving_counts=None):
    """Bring each row to the rank that owns its expert.

    1. The counts go to the ranks they are meant for; what arrives says how many rows will come from where.
    2. Both lists of counts reach the host in one copy.
    3. Rows (and scores) are exchanged.
    4. They are reordered from rank-major to expert-major.

    Args:
        x_RD: rows sorted by global expert id.
        num_tokens_per_expert_E: int64 counts of those rows.
        scores_R: one score per row, or None.
        ep_mesh: 1-D mesh over which the experts lie.
        arriving_counts: what :func:`start_counts` returned for these counts, if step 1 is under way.

    Returns:
        ``(rows, counts per local expert (int64 [L], on the rows' device), scores or None)``, and the
        :class:`TokenExchange` for :func:`combine`; None with a group of one rank, where nothing moves.
    """
    num_ranks, group = ep_mesh.size(), ep_mesh.get_group()
    if num_ranks == 1:
        return (x_RD, num_tokens_per_expert_E, scores_R), None

    if arriving_counts is None:
        arriving_counts = start_counts(platform, num_tokens_per_expert_E, ep_mesh)
    counts_E, arriving = platform.to_host(num_tokens_per_expert_E, arriving_counts.wait())
    if not platform.on_host(num_tokens_per_expert_E):
        check_counts(counts_E, x_RD.shape[0])
    recv_counts_PL = np.asarray(arriving, np.int64).reshape(num_ranks, -1)

    exchange = _plan(platform, counts_E, recv_counts_PL, like=x_RD)
    rows = _send(platform, x_RD, exchange, group, "rows")
    scores = None if scores_R is None else _send(platform, scores_R, exchange, group, "scores")
    return (rows, platform.int_tensor(recv_counts_PL.sum(0), like=x_RD), scores), exchange


def combine(platform, y_RD, exchange, ep_mesh):
    """Bring each row that the experts returned back to its source: reorder, then exchange with the splits swapped."""
    if exchange is None:
        return y_RD
    if y_RD.shape[0] != sum(exchange.recv_splits):
        raise ValueError(f"the experts returned {y_RD.shape[0]} rows for {sum(exchange.recv_splits)} that went in")
    if exchange.order_R is not None:
        y_RD = platform.take_rows(y_RD, exchange.inverse_R, exchange.order_R)
    return platform.all_to_all_rows(
        y_RD, exchange.recv_splits, exchange.send_splits, ep_mesh.get_group(), "combine: all-to-all of rows over ep"
    )


def _plan(platform, counts_E, recv_counts_PL, like):
    num_ranks, num_local_experts = recv_counts_PL.shape
    splits = splits_by_rank(counts_E, num_ranks), tuple(int(n) for n in recv_counts_PL.sum(1))
    if num_local_experts == 1:  # the two orders agree
        return TokenExchange(*splits)
    order_R = expert_major_order(recv_counts_PL)
    inverse_R = inverse_order(order_R)
    return TokenExchange(*splits, platform.int_tensor(order_R, like), platform.int_tensor(inverse_R, like))


def _send(platform, values_R, exchange, group, what):
    values_R = platform.all_to_all_rows(
        values_R, exchange.send_splits, exchange.recv_splits, group, f"dispatch: all-to-all of {what} over ep"
    )
    if exchange.order_R is None:
        return values_R
    return platform.take_rows(values_R, exchange.order_R, exchange.inverse_R)
