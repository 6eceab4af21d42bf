"""Each tp rank sends its share of the tokens; over ep every row travels once, not once per tp rank.

Shape suffixes: those of ``base``, P ranks of the ep group, Q ranks of the tp group, S tokens of this tp rank; I rows
that this rank sends, A rows that it receives over ep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.agreement import Sending, agreed_counts, described
from hyper_parallel.core.expert_parallel.exchange.base import Exchange, LocalInputs, Places, Routing
from hyper_parallel.core.expert_parallel.exchange.rows import (
    expert_major_order,
    inverse_order,
    splits_by_rank,
    start_counts,
)
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["SplitExchange"]


@dataclass(frozen=True)
class _Trip:
    """The way of this tp rank's rows, step by step.

    Attributes:
        shares: tokens of each tp rank.
        top_k, routing: of this rank's share.
        send, recv: rows to and from each ep rank.
        of_tp: rows that each tp rank received, gathered by all of them.
        order_R, inverse_R: gathered rows sorted by expert, and back.
    """

    shares: Sequence[int]
    top_k: int
    routing: Routing
    send: tuple[int, ...]
    recv: tuple[int, ...]
    of_tp: tuple[int, ...]
    order_R: Tensor
    inverse_R: Tensor


class SplitExchange(Exchange):
    """The tp ranks gather the arrived rows from each other before the experts, and after the experts each gets the sum
    of its own back. Shares of the tokens differ by one at most."""

    sums_over_tp = True
    takes_shares = True

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        assert places.tp_mesh is not None, "one rank holds every expert whole: there is nobody to share the tokens with"
        self.tp_mesh = places.tp_mesh

    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor, routing: Routing, arriving: Any
    ) -> tuple[LocalInputs, _Trip]:
        platform, num_tokens, tp = self.places.platform, x_TD.shape[0], self.tp_mesh.size()
        shares = [num_tokens // tp + (r < num_tokens % tp) for r in range(tp)]
        name = f"moe: all-gather of the tokens' gradient over {axis_name(self.tp_mesh)}"
        x_SD = platform.split_over_group(x_TD, shares, self.tp_mesh.get_group(), name)
        return self.dispatch_share(x_SD, shares, scores_TK, selected_TK)

    def dispatch_share(
        self, x_SD: Tensor, shares: Sequence[int], scores_TK: Tensor, selected_TK: Tensor
    ) -> tuple[LocalInputs, _Trip]:
        platform, tp_rank, top_k = self.places.platform, self.tp_mesh.get_local_rank(), selected_TK.shape[1]
        name = f"moe: all-gather of the scores' gradient over {axis_name(self.tp_mesh)}"
        scores_SK = platform.split_over_group(scores_TK, shares, self.tp_mesh.get_group(), name)
        mine = slice(sum(shares[:tp_rank]), sum(shares[: tp_rank + 1]))
        routing = Routing(*platform.sort_by_expert(selected_TK[mine], self.places.num_experts))
        send, arrived_QPL = self._counts(routing.counts_E, Sending.of(platform, x_SD, scores_SK))

        order = expert_major_order(arrived_QPL.reshape(-1, arrived_QPL.shape[2]))
        order_R, inverse_R, counts_L = platform.int_tensors(
            [order, inverse_order(order), arrived_QPL.sum((0, 1))], x_SD
        )
        trip = _Trip(
            shares,
            top_k,
            routing,
            send,
            recv=tuple(arrived_QPL[tp_rank].sum(1).tolist()),
            of_tp=tuple(arrived_QPL.sum((1, 2)).tolist()),
            order_R=order_R,
            inverse_R=inverse_R,
        )
        rows_ID = platform.permute(x_SD, routing.order_R, routing.inverse_R, copies=top_k)
        scores_I = platform.permute(scores_SK.reshape((shares[tp_rank] * top_k,)), routing.order_R, routing.inverse_R)
        scores_R = self._bring(scores_I, trip, "scores")
        rows_RD = self._bring(rows_ID, trip, "rows")
        return LocalInputs(rows_RD, counts_L, scores_R), trip

    def combine(self, rows_RD: Tensor, trip: _Trip) -> Tensor:
        name = f"moe: all-gather of the output tokens over {axis_name(self.tp_mesh)}"
        y_SD = self.combine_share(rows_RD, trip)
        return self.places.platform.gather_from_group(y_SD, trip.shares, self.tp_mesh.get_group(), name)

    def combine_share(self, rows_RD: Tensor, trip: _Trip) -> Tensor:
        platform, ep_mesh, tp_mesh = self.places.platform, self.places.ep_mesh, self.tp_mesh
        rows_RD = platform.permute(rows_RD, trip.inverse_R, trip.order_R)
        name = f"combine: reduce-scatter of rows over {axis_name(tp_mesh)}"
        rows_AD = _reduce_scatter(platform, rows_RD, trip.of_tp, tp_mesh, name)
        if ep_mesh is not None:
            name = f"combine: all-to-all of rows over {axis_name(ep_mesh)}"
            rows_AD = platform.all_to_all_rows(rows_AD, trip.recv, trip.send, ep_mesh.get_group(), name)
        return platform.unpermute(rows_AD, trip.routing.order_R, trip.routing.inverse_R, trip.top_k)

    def _counts(self, counts_E: Tensor, sending: Sending) -> tuple[tuple[int, ...], np.ndarray]:
        """Rows to each ep rank, and rows received by each tp rank [Q], from each ep rank [P], for each local expert
        [L]: one copy to the host."""
        platform, ep_mesh, tp_mesh = self.places.platform, self.places.ep_mesh, self.tp_mesh
        if ep_mesh is None:
            arrived = described(platform, counts_E.reshape((1, -1)), sending)
        else:
            arrived = start_counts(platform, counts_E, sending, ep_mesh).wait()
        counts, received = platform.start_counts_exchange(
            platform.concat([arrived] * tp_mesh.size(), 0),
            tp_mesh.get_group(),
            f"dispatch: all-gather of counts over {axis_name(tp_mesh)}",
            also=(counts_E,),
        ).to_host()
        num_ranks = 1 if ep_mesh is None else ep_mesh.size()
        tp = tp_mesh.size()
        received_RL = agreed_counts(received, tp * num_ranks, self._names_of_ranks)
        return splits_by_rank(counts, num_ranks), received_RL.reshape(tp_mesh.size(), num_ranks, -1)

    def _names_of_ranks(self) -> list[str]:
        ep_mesh, tp_axis = self.places.ep_mesh, axis_name(self.tp_mesh)
        of_ep = [""] if ep_mesh is None else [f"{axis_name(ep_mesh)} {p}, " for p in range(ep_mesh.size())]
        return [f"({ep}{tp_axis} {q})" for q in range(self.tp_mesh.size()) for ep in of_ep]

    def _bring(self, values: Tensor, trip: _Trip, what: str) -> Tensor:
        """This rank's rows, or their scores -> those of all tp ranks for this rank's experts, by expert."""
        platform, ep_mesh, tp_mesh = self.places.platform, self.places.ep_mesh, self.tp_mesh
        if ep_mesh is not None:
            name = f"dispatch: all-to-all of {what} over {axis_name(ep_mesh)}"
            values = platform.all_to_all_rows(values, trip.send, trip.recv, ep_mesh.get_group(), name)
        name = f"dispatch: all-gather of {what} over {axis_name(tp_mesh)}"
        values = _all_gather(platform, values, trip.of_tp, tp_mesh, name)
        return platform.permute(values, trip.order_R, trip.inverse_R)


def _all_gather(platform: Platform, x: Tensor, splits: tuple[int, ...], mesh: Mesh, name: str) -> Tensor:
    """The rows of all ranks, ``splits[r]`` of rank r. Its gradient, a reduce-scatter, follows from its parts."""
    mine = (splits[mesh.get_local_rank()],) * mesh.size()
    return platform.all_to_all_rows(platform.concat([x] * mesh.size(), 0), mine, splits, mesh.get_group(), name)


def _reduce_scatter(platform: Platform, x: Tensor, splits: tuple[int, ...], mesh: Mesh, name: str) -> Tensor:
    """The sum over the ranks of this rank's ``splits[r]`` rows. Its gradient is an all-gather."""
    size = splits[mesh.get_local_rank()]
    x = platform.all_to_all_rows(x, splits, (size,) * mesh.size(), mesh.get_group(), name)
    return x.reshape((mesh.size(), size, *x.shape[1:])).sum(0) if size else x
