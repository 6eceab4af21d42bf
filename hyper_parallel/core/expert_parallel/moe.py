"""The arithmetic of router, experts and MoE layer, written once for both frameworks.

Shape suffixes: T tokens, K experts per token, R rows (T * K in a MoE layer), E experts, H hidden size, D model size.
"""

from hyper_parallel.core.expert_parallel.checks import ExpertShapes, check_inputs
from hyper_parallel.core.expert_parallel.layer import InsideMoE

__all__ = [
    "grouped_experts",
    "experts_from_products",
    "feed_forward",
    "check_router",
    "route",
    "mixture_of_experts",
    "update_expert_bias",
]


def grouped_experts(platform, w1_EHD, w2_EDH, w3_EHD, x_RD, num_tokens_per_expert_E, scores_R=None):
    """SwiGLU experts on rows sorted by expert: ``scores * w2(silu(w1 x) * (w3 x))``.

    The scores enter before w2, where they cost no memory of their own; w2 is linear, so they scale the output row.

    Returns:
        [R, D]; with weights that hold a slice of the hidden dim, this slice's term of it.
    """
    num_experts, hidden_dim, dim = (int(size) for size in w1_EHD.shape)
    check_inputs(platform, ExpertShapes(num_experts, hidden_dim, dim), x_RD, num_tokens_per_expert_E, scores_R)
    if not platform.same_dtype(x_RD, w1_EHD):
        raise ValueError(
            f"rows are {x_RD.dtype} but the experts' weights {w1_EHD.dtype}; cast one of them, or use autocast where "
            "the framework has it"
        )
    return platform.swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)


def experts_from_products(kernels, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
    """SwiGLU experts from a platform's grouped products.

    Args:
        kernels: has ``row_groups(counts_E)``, computed once and handed to ``grouped_linear(x_RD, w_END, groups)``,
            which gives ``x @ w[e].T`` per expert, and ``swiglu(gate_RH, up_RH, scores_R or None)``.
    """
    groups = kernels.row_groups(num_tokens_per_expert_E)
    gate_RH = kernels.grouped_linear(x_RD, w1_EHD, groups)
    up_RH = kernels.grouped_linear(x_RD, w3_EHD, groups)
    return kernels.grouped_linear(kernels.swiglu(gate_RH, up_RH, scores_R), w2_EDH, groups)


def feed_forward(platform, w1, w2, w3, x):
    """Dense SwiGLU on [..., D]; ``w1``, ``w2``, ``w3`` are the framework's linear layers."""
    return w2(platform.swiglu(w1(x), w3(x)))


def check_router(num_experts, top_k, score_func, num_expert_groups, num_limited_groups):
    """Raise ``ValueError`` for sizes or names that no router can have."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must lie between 1 and num_experts ({num_experts})")
    if score_func not in ("softmax", "sigmoid"):
        raise ValueError(f'score_func must be "softmax" or "sigmoid", got {score_func!r}')
    if (num_expert_groups is None) != (num_limited_groups is None):
        raise ValueError("num_expert_groups and num_limited_groups must be given together")
    if num_expert_groups is None:
        return
    if num_experts % num_expert_groups or num_experts // num_expert_groups < 2:
        raise ValueError(f"num_experts ({num_experts}) must fill num_expert_groups ({num_expert_groups}) of at least 2")
    if not 1 <= num_limited_groups <= num_expert_groups:
        raise ValueError(f"num_limited_groups ({num_limited_groups}) must lie between 1 and {num_expert_groups}")
    if top_k > num_limited_groups * (num_experts // num_expert_groups):
        raise ValueError(f"top_k ({top_k}) does not fit into {num_limited_groups} groups of experts")


def route(platform, router, x_TD, expert_bias_E=None):
    """Choose each token's experts.

    Args:
        router: has ``gate`` (D -> E), ``top_k``, ``score_func``, ``route_norm``, ``route_scale``,
            ``num_expert_groups`` and ``num_limited_groups``.
        expert_bias_E: added to the scores for the choice only (Wang et al. 2024, "Auxiliary-loss-free load
            balancing"); the scores that are returned do not contain it.

    Returns:
        scores [T, K] in fp32 (or wider), differentiable; ids [T, K] int64.
    """
    scores_TE = platform.probabilities(router.gate(x_TD), router.score_func)
    wanted_TE = platform.detach(scores_TE)
    if expert_bias_E is not None:
        wanted_TE = wanted_TE + expert_bias_E
    if router.num_expert_groups is not None:
        wanted_TE = _limit_to_groups(platform, wanted_TE, router.num_expert_groups, router.num_limited_groups)
    selected_TK = platform.top_indices(wanted_TE, router.top_k)
    scores_TK = platform.pick(scores_TE, selected_TK)
    if router.route_norm:
        scores_TK = scores_TK / (scores_TK.sum(1).reshape((scores_TK.shape[0], 1)) + 1e-20)
    return scores_TK * router.route_scale, selected_TK


def _limit_to_groups(platform, wanted_TE, num_groups, num_limited):
    """Put experts outside of each token's best groups out of reach; a group is worth its two best experts
    (DeepSeek-V3, section 2.1.2)."""
    num_tokens, num_experts = wanted_TE.shape
    size = num_experts // num_groups
    of_groups = wanted_TE.reshape((num_tokens * num_groups, size))
    worth_TG = platform.pick(of_groups, platform.top_indices(of_groups, 2)).sum(1).reshape((num_tokens, num_groups))
    chosen_TG = platform.mark(platform.top_indices(worth_TG, num_limited), num_groups)
    out_of_reach = (chosen_TG.reshape((num_tokens, num_groups, 1)) - 1.0) * 1e30
    return (wanted_TE.reshape((num_tokens, num_groups, size)) + out_of_reach).reshape((num_tokens, num_experts))


def mixture_of_experts(platform, moe, x):
    """A MoE layer: route, run the chosen experts, sum their scored outputs, add the shared expert.

    Args:
        moe: has ``router``, ``experts``, ``shared_experts`` (or None), ``score_position``, ``expert_bias`` (or None)
            and ``tokens_per_expert``.
        x: [..., D]. With tensor-parallel experts all tp ranks hold the same x.

    Returns:
        The shape and dtype of x.
    """
    x_TD = x if len(x.shape) == 2 else x.reshape((_product(x.shape[:-1]), x.shape[-1]))
    scores_TK, selected_TK = moe.router(x_TD, moe.expert_bias)
    routing = platform.sort_by_expert(selected_TK, moe.router.num_experts)
    scores_TK = platform.count_in_backward(scores_TK, moe.tokens_per_expert, routing[2])
    region = _TensorParallelRegion(platform, moe)

    inputs_TD, scores_TK = region.enter(x_TD, scores_TK)
    y_TD = region.routed_part(inputs_TD, scores_TK, selected_TK, routing)
    if moe.shared_experts is not None and region.holds_shared_experts:
        y_TD = y_TD + moe.shared_experts(inputs_TD, inside=InsideMoE())
    y_TD = region.leave(y_TD)
    if moe.shared_experts is not None and not region.holds_shared_experts:
        y_TD = y_TD + moe.shared_experts(x_TD)
    return y_TD if len(x.shape) == 2 else y_TD.reshape(tuple(x.shape))


def routed_rows(platform, moe, x_TD, scores_TK, routing, keywords=None, experts=None):
    """Sum over each token's experts of score times output, one row per token and expert.

    Args:
        routing: order, inverse and counts of ``Platform.sort_by_expert``.
        keywords: for the call of ``moe.experts``.
        experts: ``(rows_RD, scores_R) -> rows`` in the place of ``moe.experts``; it applies the scores.
    """
    order_R, inverse_R, counts_E = routing
    num_tokens, top_k = scores_TK.shape
    rows_RD = platform.take_rows(x_TD, order_R, inverse_R, copies=top_k)
    scores_R = platform.take_rows(scores_TK.reshape((num_tokens * top_k,)), order_R, inverse_R)
    if experts is None:
        rows_RD = scored_experts(platform, moe, rows_RD, counts_E, scores_R, keywords or {})
    else:
        rows_RD = experts(rows_RD, scores_R)
    return platform.sum_copies(rows_RD, order_R, inverse_R, top_k)


def scored_experts(platform, moe, rows_RD, counts_E, scores_R, keywords):
    """Call the layer's experts with the scores where the layer wants them."""
    if moe.score_position == "inside":
        return moe.experts(rows_RD, counts_E, scores_R, **keywords)
    if moe.score_position == "before":
        return moe.experts(platform.scale_rows(rows_RD, scores_R), counts_E, **keywords)
    return platform.scale_rows(moe.experts(rows_RD, counts_E, **keywords), scores_R)


class _TensorParallelRegion:
    """The part of one MoE call whose values are terms of a sum over tp: one sum per layer each way, on [T, D]."""

    def __init__(self, platform, moe):
        self._platform, self._moe = platform, moe
        self._layer = platform.parallel_layer(moe.experts)
        own_sum = self._layer is None or self._layer.style.sums_over_tp
        tp_mesh = None if own_sum else self._layer.mesh_axis("tp")
        self._group = None if tp_mesh is None else tp_mesh.get_group()
        self._dtype = None if tp_mesh is None else self._layer.style.reduce_dtype
        shared = None if moe.shared_experts is None else platform.parallel_layer(moe.shared_experts)
        shared_mesh = None if shared is None else shared.mesh_axis("tp")
        self.holds_shared_experts = (
            self._group is not None and shared_mesh is not None and shared_mesh.get_group() == self._group
        )

    def enter(self, x_TD, scores_TK):
        if self._group is None:
            return x_TD, scores_TK
        copy, group, dtype = self._platform.copy_to_group, self._group, self._dtype
        return (
            copy(x_TD, group, "moe: sum of the tokens' gradient over tp", dtype),
            copy(scores_TK, group, "moe: sum of the scores' gradient over tp", dtype),
        )

    def routed_part(self, x_TD, scores_TK, selected_TK, routing):
        """As the experts' style does it; without one, or for an exact one, row by row."""
        if self._layer is None:
            return routed_rows(self._platform, self._moe, x_TD, scores_TK, routing)
        style = self._layer.style
        if hasattr(style, "routed_part"):
            return style.routed_part(self._layer, self._moe, x_TD, scores_TK, selected_TK, routing)
        # The counts travel while the rows are gathered.
        keywords = {"inside": style.begin(self._layer, self._moe.experts, routing[2])}
        return routed_rows(self._platform, self._moe, x_TD, scores_TK, routing, keywords)

    def leave(self, y_TD):
        if self._group is None:
            return y_TD
        name = "moe: sum of the output tokens over tp"
        return self._platform.reduce_from_group(y_TD, self._group, name, self._dtype)


def update_expert_bias(platform, moe, device_mesh=None):
    """Move the bias of overloaded experts down and of underloaded ones up, and start to count anew.

    ``bias += rate * sign(mean load - load)`` (Wang et al. 2024, algorithm 1).
    """
    load_E = moe.tokens_per_expert
    for axis in range(0 if device_mesh is None else device_mesh.ndim):
        group = device_mesh.get_group(axis)
        load_E = platform.sum_over_group(load_E, group, "update_expert_bias: sum of the loads")
    load_E = load_E * 1.0
    mean = load_E.sum(0) / load_E.shape[0]
    platform.assign(moe.expert_bias, moe.expert_bias + (mean - load_E).sign() * moe.bias_update_rate)
    platform.assign(moe.tokens_per_expert, load_E * 0.0)


def _product(sizes):
    product = 1
    for size in sizes:
        product *= size
    return product
