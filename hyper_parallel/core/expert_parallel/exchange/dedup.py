"""One row per token and rank: a token crosses to an ep rank once, however many of its experts live there.

Shape suffixes: those of ``base``, P ranks of the ep group; M tokens sent and N tokens received, one per token and rank.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.agreement import Sending, agreed_counts, described, ranks_of
from hyper_parallel.core.expert_parallel.exchange.base import Exchange, LocalInputs, Places, Routing
from hyper_parallel.core.types import Tensor

__all__ = ["DedupExchange"]


@dataclass(frozen=True)
class _Trip:
    """What went where.

    Attributes:
        num_tokens: T.
        token_M: which token each sent row is. send, recv: rows to and from each rank.
        source_R: of which received row each row of the experts is a copy.
    """

    num_tokens: int
    token_M: Tensor
    source_R: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]


class DedupExchange(Exchange):
    """The expert's rank copies a token to its experts, and sums their outputs before one row goes back."""

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        assert places.ep_mesh is not None, "one rank holds all experts: nothing crosses"
        self.ep_mesh = places.ep_mesh

    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, selected_TK: Tensor, routing: Routing, arriving: Any
    ) -> tuple[LocalInputs, _Trip]:
        platform, size = self.places.platform, self.places.experts_per_rank
        num_experts, ep_mesh = self.places.num_experts, self.ep_mesh
        num_tokens, top_k = selected_TK.shape
        needs_TP = platform.multi_hot(platform.floor_divide(selected_TK, size), ep_mesh.size())
        send, recv, counts_L = self._plan(needs_TP, routing.counts_E, Sending.of(platform, x_TD, scores_TK))

        # Rank-major: all tokens that rank 0 needs, then those of rank 1, and so on.
        token_M = platform.nonzero(needs_TP.T.reshape((num_tokens * ep_mesh.size(),)), sum(send)) % num_tokens
        x_ND, scores_NK, selected_NK = (
            self._exchange(platform.index_select(values, token_M), send, recv, f"dispatch: all-to-all of {what}")
            for values, what in ((x_TD, "tokens"), (scores_TK, "scores"), (selected_TK, "expert ids"))
        )

        # Counted from this rank's first expert, its experts come first, and what belongs to other ranks last.
        first = ep_mesh.get_local_rank() * size
        order, _, _ = platform.sort_by_expert((selected_NK + (num_experts - first)) % num_experts, num_experts)
        order_R = order[: int(counts_L.sum())]
        source_R = platform.floor_divide(order_R, top_k)
        inputs = LocalInputs(
            platform.index_select(x_ND, source_R),
            platform.int_tensor(counts_L, x_TD),
            platform.index_select(scores_NK.reshape((sum(recv) * top_k,)), order_R),
        )
        return inputs, _Trip(num_tokens, token_M, source_R, send, recv)

    def combine(self, rows_RD: Tensor, trip: _Trip) -> Tensor:
        platform = self.places.platform
        y_ND = platform.index_add(rows_RD, trip.source_R, sum(trip.recv))
        y_MD = self._exchange(y_ND, trip.recv, trip.send, "combine: all-to-all of tokens")
        return platform.index_add(y_MD, trip.token_M, trip.num_tokens)

    def _exchange(self, values: Tensor, send: tuple[int, ...], recv: tuple[int, ...], name: str) -> Tensor:
        name = f"{name} over {axis_name(self.ep_mesh)}"
        return self.places.platform.all_to_all_rows(values, send, recv, self.ep_mesh.get_group(), name)

    def _plan(
        self, needs_TP: Tensor, counts_E: Tensor, sending: Sending
    ) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
        """Tokens to each rank, tokens from each rank, and rows of each of its experts: one copy to the host."""
        platform, ep_mesh = self.places.platform, self.ep_mesh
        num_ranks = ep_mesh.size()
        tokens_P = platform.to_int(needs_TP.sum(0)) if needs_TP.shape[0] else counts_E[:num_ranks] * 0
        # To each rank: the rows for each of its experts, then the tokens that they come from.
        meant = platform.concat([counts_E.reshape((num_ranks, -1)), tokens_P.reshape((num_ranks, 1))], 1)
        name = f"dispatch: all-to-all of counts over {axis_name(ep_mesh)}"
        arriving = platform.start_counts_exchange(
            described(platform, meant, sending), ep_mesh.get_group(), name, also=(tokens_P,)
        )
        send, arrived = arriving.to_host()
        received = agreed_counts(arrived, num_ranks, ranks_of(ep_mesh))
        return tuple(send), tuple(received[:, -1].tolist()), received[:, :-1].sum(0)
