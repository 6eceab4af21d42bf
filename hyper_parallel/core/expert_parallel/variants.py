"""Two styles for a MoE layer that send fewer bytes over ep than the exact exchange of rows.

They shard like ``ExpertTensorParallel``, and applied to bare experts they are that style: rows are all they see. Inside
a ``MoE`` they replace the routed part, because they need to know which rows belong to one token.

Shape suffixes: T tokens, K experts per token, R rows of this rank's experts, E experts, L experts of one rank, P ranks
of the ep group, D model size; M tokens sent and N tokens received (one per token and rank); S tokens of this tp rank.
"""

import numpy as np

from hyper_parallel.core.expert_parallel import token_exchange
from hyper_parallel.core.expert_parallel.expert_parallel import ExpertTensorParallel
from hyper_parallel.core.expert_parallel.layer import InsideMoE
from hyper_parallel.core.expert_parallel.moe import routed_rows, scored_experts
from hyper_parallel.platform import get_platform

__all__ = ["DedupExpertTensorParallel", "SplitExpertTensorParallel"]


class DedupExpertTensorParallel(ExpertTensorParallel):
    """A token crosses to an ep rank once, however many of its experts live there.

    The expert's rank copies it to its experts, weights and sums their outputs, and sends one row back. With uniform
    routing over P ranks a token travels to ``P * (1 - (1 - 1/P)^K)`` ranks instead of K times. Results differ from
    ``ExpertTensorParallel`` by the order of a token's sum only.
    """

    def routed_part(self, layer, moe, x_TD, scores_TK, selected_TK, routing):
        """Sum over each token's experts of score times output; called by the MoE layer, inside its tp region."""
        ep_mesh = layer.mesh_axis("ep")
        platform = get_platform(moe)
        if ep_mesh is None:
            return routed_rows(platform, moe, x_TD, scores_TK, routing, {"inside": InsideMoE()})
        num_tokens, top_k = selected_TK.shape
        num_experts, num_ranks, group = layer.shapes.num_experts, ep_mesh.size(), ep_mesh.get_group()
        send, recv, counts_L = self._plan(platform, selected_TK, routing[2], num_experts, ep_mesh)

        def exchange(x, splits, back, what):
            return platform.all_to_all_rows(x, splits, back, group, f"all-to-all of {what} over ep")

        # Rank-major: all tokens that rank 0 needs, then those of rank 1, and so on.
        needs_TP = platform.mark(selected_TK // (num_experts // num_ranks), num_ranks)
        token_M = platform.marked_positions(needs_TP.T.reshape((num_tokens * num_ranks,)), sum(send)) % num_tokens
        x_ND = exchange(platform.gather_rows(x_TD, token_M), send, recv, "dispatch: tokens")
        scores_NK = exchange(platform.gather_rows(scores_TK, token_M), send, recv, "dispatch: scores")
        selected_NK = exchange(platform.gather_rows(selected_TK, token_M), send, recv, "dispatch: expert ids")

        # Counted from this rank's first expert, its experts come first, and what belongs to other ranks last.
        first = ep_mesh.get_local_rank() * (num_experts // num_ranks)
        order, _, _ = platform.sort_by_expert((selected_NK + (num_experts - first)) % num_experts, num_experts)
        order_R = order[: int(counts_L.sum())]
        rows_RD = platform.gather_rows(x_ND, order_R // top_k)
        scores_R = platform.gather_rows(scores_NK.reshape((sum(recv) * top_k,)), order_R)
        counts_L = platform.int_tensor(counts_L, x_TD)
        y_RD = scored_experts(platform, moe, rows_RD, counts_L, scores_R, {"inside": InsideMoE(rows_are_local=True)})

        y_ND = platform.sum_rows(y_RD, order_R // top_k, sum(recv))
        y_MD = exchange(y_ND, recv, send, "combine: tokens")
        return platform.sum_rows(y_MD, token_M, num_tokens)

    def _plan(self, platform, selected_TK, counts_E, num_experts, ep_mesh):
        """Tokens to each rank, tokens from each rank, and rows of each of its experts: one copy to the host."""
        num_ranks, num_tokens = ep_mesh.size(), selected_TK.shape[0]
        needs_TP = platform.mark(selected_TK // (num_experts // num_ranks), num_ranks)
        tokens_P = platform.to_int(needs_TP.sum(0)) if num_tokens else counts_E[:num_ranks] * 0
        # To each rank: the rows for each of its experts, then the tokens that they come from.
        meant = platform.concat([counts_E.reshape((num_ranks, -1)), tokens_P.reshape((num_ranks, 1))], 1)
        size = meant.shape[0] * meant.shape[1]
        name = "dispatch: all-to-all of counts over ep"
        arriving = platform.start_counts_exchange(meant.reshape((size,)), ep_mesh.get_group(), name)
        send, arrived = platform.to_host(tokens_P, arriving.wait())
        arrived = np.asarray(arrived, np.int64).reshape(num_ranks, -1)
        return tuple(send), tuple(arrived[:, -1].tolist()), arrived[:, :-1].sum(0)


class SplitExpertTensorParallel(ExpertTensorParallel):
    """Each tp rank routes its share of the tokens; over ep every row travels once, not once per tp rank.

    The tp ranks gather the arrived rows from each other before the experts, and after the experts each gets the sum of
    its own back. For clusters where ep crosses hosts and tp does not: 1/tp of the bytes over ep, for an all-gather and
    a reduce-scatter of the rows over tp. Any number of tokens will do; shares differ by one at most. Terms of the sum
    over tp travel in the dtype of the rows: there is no ``reduce_dtype``.
    """

    sums_over_tp = True

    def __init__(self):
        super().__init__()

    def routed_part(self, layer, moe, x_TD, scores_TK, selected_TK, routing):
        """Sum over each token's experts of score times output, complete; called by the MoE layer."""
        platform, tp_mesh = get_platform(moe), layer.mesh_axis("tp")
        if tp_mesh is None:
            keywords = {"inside": self.begin(layer, moe.experts, routing[2])}
            return routed_rows(platform, moe, x_TD, scores_TK, routing, keywords)
        tp, tp_rank, group = tp_mesh.size(), tp_mesh.get_local_rank(), tp_mesh.get_group()
        shares = [x_TD.shape[0] // tp + (r < x_TD.shape[0] % tp) for r in range(tp)]
        mine = slice(sum(shares[:tp_rank]), sum(shares[: tp_rank + 1]))
        x_SD = platform.split_over_group(x_TD, shares, group, "moe: all-gather of the tokens' gradient over tp")
        scores_SK = platform.split_over_group(
            scores_TK, shares, group, "moe: all-gather of the scores' gradient over tp"
        )
        routing = platform.sort_by_expert(selected_TK[mine], layer.shapes.num_experts)
        plan = self._plan(platform, routing[2], layer)

        def local_experts(rows_RD, scores_R):
            return self._experts(platform, moe, rows_RD, scores_R, plan, layer)

        y_SD = routed_rows(platform, moe, x_SD, scores_SK, routing, experts=local_experts)
        return platform.gather_from_group(y_SD, shares, group, "moe: all-gather of the output tokens over tp")

    def _plan(self, platform, counts_E, layer):
        """Splits over ep, rows per tp rank, and the counts of all of them: one copy to the host."""
        ep_mesh, tp_mesh = layer.mesh_axis("ep"), layer.mesh_axis("tp")
        arrived = counts_E
        if ep_mesh is not None:
            arrived = token_exchange.start_counts(platform, counts_E, ep_mesh).wait()
        arrived = platform.start_counts_exchange(
            platform.concat([arrived] * tp_mesh.size(), 0),
            tp_mesh.get_group(),
            "dispatch: all-gather of counts over tp",
        ).wait()
        counts_E, arrived = platform.to_host(counts_E, arrived)
        num_ranks = 1 if ep_mesh is None else ep_mesh.size()
        arrived = np.asarray(arrived, np.int64).reshape(tp_mesh.size(), num_ranks, -1)
        return token_exchange.splits_by_rank(counts_E, num_ranks), arrived

    def _experts(self, platform, moe, rows_RD, scores_R, plan, layer):
        """Rows of this tp rank's tokens, by expert -> their experts' outputs, summed over tp, in the same order."""
        ep_mesh, tp_mesh = layer.mesh_axis("ep"), layer.mesh_axis("tp")
        send, arrived = plan
        from_ranks = tuple(arrived[tp_mesh.get_local_rank()].sum(1).tolist())
        of_tp = tuple(arrived.sum((1, 2)).tolist())
        counts_L = arrived.sum((0, 1))
        order = token_exchange.expert_major_order(arrived.reshape(-1, arrived.shape[2]))
        order_R = platform.int_tensor(order, rows_RD)
        inverse_R = platform.int_tensor(token_exchange.inverse_order(order), rows_RD)

        def bring(values, what):
            if ep_mesh is not None:
                name = f"dispatch: all-to-all of {what} over ep"
                values = platform.all_to_all_rows(values, send, from_ranks, ep_mesh.get_group(), name)
            values = _all_gather(platform, values, of_tp, tp_mesh, f"dispatch: all-gather of {what} over tp")
            return platform.take_rows(values, order_R, inverse_R)

        counts_L = platform.int_tensor(counts_L, rows_RD)
        inside = {"inside": InsideMoE(rows_are_local=True)}
        scores_R = bring(scores_R, "scores")
        y_RD = scored_experts(platform, moe, bring(rows_RD, "rows"), counts_L, scores_R, inside)
        y_RD = platform.take_rows(y_RD, inverse_R, order_R)
        y_RD = _reduce_scatter(platform, y_RD, of_tp, tp_mesh, "combine: reduce-scatter of rows over tp")
        if ep_mesh is None:
            return y_RD
        name = "combine: all-to-all of rows over ep"
        return platform.all_to_all_rows(y_RD, from_ranks, send, ep_mesh.get_group(), name)


def _all_gather(platform, x, splits, mesh, name):
    """The rows of all ranks, ``splits[r]`` of rank r. Its gradient, a reduce-scatter, follows from its parts."""
    mine = (splits[mesh.get_local_rank()],) * mesh.size()
    return platform.all_to_all_rows(platform.concat([x] * mesh.size(), 0), mine, splits, mesh.get_group(), name)


def _reduce_scatter(platform, x, splits, mesh, name):
    """The sum over the ranks of this rank's ``splits[r]`` rows. Its gradient is an all-gather."""
    size = splits[mesh.get_local_rank()]
    x = platform.all_to_all_rows(x, splits, (size,) * mesh.size(), mesh.get_group(), name)
    return x.reshape((mesh.size(), size, *x.shape[1:])).sum(0) if size else x
