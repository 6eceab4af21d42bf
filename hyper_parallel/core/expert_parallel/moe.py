"""The arithmetic of router, experts and MoE layer, written once for both frameworks.

Shape suffixes: T tokens, K experts per token, R rows (T * K in a MoE layer), E experts, H hidden size, D model size.
"""

from hyper_parallel.core.expert_parallel.checks import ExpertShapes, check_inputs

__all__ = ["grouped_experts", "experts_from_products", "feed_forward", "route", "mixture_of_experts", "check_router"]


def grouped_experts(platform, w1_EHD, w2_EDH, w3_EHD, x_RD, num_tokens_per_expert_E, scores_R=None):
    """SwiGLU experts on rows sorted by expert: ``scores * w2(silu(w1 x) * (w3 x))``.

    The scores enter before w2, where they cost no memory of their own; w2 is linear, so they scale the output row.

    Returns:
        [R, D]; with weights that hold a slice of the hidden dim, this slice's term of it.
    """
    num_experts, hidden_dim, dim = (int(size) for size in w1_EHD.shape)
    check_inputs(platform, ExpertShapes(num_experts, hidden_dim, dim), x_RD, num_tokens_per_expert_E, scores_R)
    if not platform.same_dtype(x_RD, w1_EHD):
        raise ValueError(f"rows are {x_RD.dtype} but the experts' weights {w1_EHD.dtype}; cast one of them")
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


def check_router(num_experts, top_k, score_func):
    """Raise ``ValueError`` for sizes or names that no router can have."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must lie between 1 and num_experts ({num_experts})")
    if score_func not in ("softmax", "sigmoid"):
        raise ValueError(f'score_func must be "softmax" or "sigmoid", got {score_func!r}')


def route(platform, router, x_TD):
    """Choose each token's experts.

    Args:
        router: has ``gate`` (D -> E), ``num_experts``, ``top_k``, ``score_func``, ``route_norm``, ``route_scale``.

    Returns:
        scores [T, K] in fp32, differentiable; ids [T, K] int64.
    """
    logits_TE = router.gate(x_TD)
    return platform.top_k(logits_TE, router.top_k, router.score_func, router.route_norm, router.route_scale)


def mixture_of_experts(platform, moe, x):
    """A MoE layer: route, run the chosen experts, sum their scored outputs, add the shared expert.

    Args:
        moe: has ``router``, ``experts`` and ``shared_experts`` (or None).
        x: [..., D]. With tensor-parallel experts all tp ranks hold the same x.

    Returns:
        The shape and dtype of x.
    """
    dim = x.shape[-1]
    num_tokens = 1
    for size in x.shape[:-1]:
        num_tokens *= size
    x_TD = platform.reshape(x, (num_tokens, dim))
    scores_TK, selected_TK = moe.router(x_TD)
    top_k = scores_TK.shape[1]
    order_R, inverse_R, counts_E = platform.sort_by_expert(selected_TK, moe.router.num_experts)

    rows_RD = platform.take_rows(x_TD, order_R, inverse_R, copies=top_k)
    scores_R = platform.take_rows(platform.reshape(scores_TK, (num_tokens * top_k,)), order_R, inverse_R)
    rows_RD = moe.experts(rows_RD, counts_E, scores_R)
    rows_RD = platform.take_rows(rows_RD, inverse_R, order_R)
    y_TD = platform.sum_copies(platform.reshape(rows_RD, (num_tokens, top_k, dim)))
    if moe.shared_experts is not None:
        y_TD = y_TD + moe.shared_experts(x_TD)
    return platform.reshape(y_TD, tuple(x.shape))
