"""The arithmetic of routing.

Shape suffixes: T tokens, K experts per token, E experts, G groups of experts, D model size.
"""

from typing import Any

from hyper_parallel.core.expert_parallel.checks import product
from hyper_parallel.core.types import Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["check_router", "check_sizes", "route"]


def check_sizes(**sizes: int) -> None:
    """Raise ``TypeError`` for a size that is no integer, ``ValueError`` for one below 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r}")
        if size < 1 and name != "top_k":
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_router(
    num_experts: int,
    top_k: int,
    score_func: str,
    num_expert_groups: int | None,
    num_limited_groups: int | None,
    group_score_top_k: int = 2,
) -> None:
    """Raise ``ValueError`` for sizes or names that no router can have, ``TypeError`` for sizes that are no integers."""
    check_sizes(num_experts=num_experts, top_k=top_k, group_score_top_k=group_score_top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must lie between 1 and num_experts ({num_experts})")
    if score_func not in ("softmax", "sigmoid"):
        raise ValueError(f'score_func must be "softmax" or "sigmoid", got {score_func!r}')
    if (num_expert_groups is None) != (num_limited_groups is None):
        raise ValueError("num_expert_groups and num_limited_groups must be given together")
    if num_expert_groups is None or num_limited_groups is None:
        return
    if num_experts % num_expert_groups or num_experts // num_expert_groups < group_score_top_k:
        raise ValueError(
            f"num_experts ({num_experts}) must fill num_expert_groups ({num_expert_groups}) of at least "
            f"{group_score_top_k}"
        )
    if not 1 <= num_limited_groups <= num_expert_groups:
        raise ValueError(f"num_limited_groups ({num_limited_groups}) must lie between 1 and {num_expert_groups}")
    if top_k > num_limited_groups * (num_experts // num_expert_groups):
        raise ValueError(f"top_k ({top_k}) does not fit into {num_limited_groups} groups of experts")


def route(platform: Platform, router: Any, x_TD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        router: has ``gate`` (D -> E), ``top_k``, ``score_func``, ``route_norm``, ``route_scale``,
            ``num_expert_groups``, ``num_limited_groups`` and ``group_score_top_k``.
        expert_bias_E: added to the scores for the choice only (Wang et al. 2024, "Auxiliary-loss-free load
            balancing"); the scores that are returned do not contain it.

    Returns:
        scores [T, K] in fp32 (or wider), differentiable; ids [T, K] int64.
    """
    scores_TE = platform.probabilities(product(platform, router.gate, x_TD), router.score_func)
    wanted_TE = platform.detach(scores_TE)
    if expert_bias_E is not None:
        wanted_TE = wanted_TE + expert_bias_E
    if router.num_expert_groups is not None:
        groups = router.num_expert_groups, router.num_limited_groups, router.group_score_top_k
        wanted_TE = _limit_to_groups(platform, wanted_TE, *groups)
    selected_TK = platform.top_indices(wanted_TE, router.top_k)
    scores_TK = platform.take_along(scores_TE, selected_TK)
    if router.route_norm:
        scores_TK = scores_TK / (scores_TK.sum(1).reshape((scores_TK.shape[0], 1)) + 1e-20)
    return scores_TK * router.route_scale, selected_TK


def _limit_to_groups(platform: Platform, wanted_TE: Tensor, num_groups: int, num_limited: int, num_best: int) -> Tensor:
    """Put experts outside of each token's best groups out of reach; a group is worth its ``num_best`` best experts
    together (2 in DeepSeek-V3, section 2.1.2; 1 in DeepSeek-V2, section 2.2.2)."""
    num_tokens, num_experts = wanted_TE.shape
    size = num_experts // num_groups
    of_groups = wanted_TE.reshape((num_tokens * num_groups, size))
    worth_TG = (
        platform.take_along(of_groups, platform.top_indices(of_groups, num_best))
        .sum(1)
        .reshape((num_tokens, num_groups))
    )
    chosen_TG = platform.multi_hot(platform.top_indices(worth_TG, num_limited), num_groups)
    out_of_reach = (chosen_TG.reshape((num_tokens, num_groups, 1)) - 1.0) * 1e30
    return (wanted_TE.reshape((num_tokens, num_groups, size)) + out_of_reach).reshape((num_tokens, num_experts))
