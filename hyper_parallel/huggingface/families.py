"""Which model families have a MoE layer that ``MoE`` can be, and how their configurations and weights spell it.

What a family computes is what its block of transformers 5.24 computes. A field that would make the layer another one is
refused by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.plan.config import ConfigError, read_layer_sizes

__all__ = ["FAMILIES", "Family", "family_of", "moe_arguments"]

# Names of an expert's gate, up and down matrices.
LLAMA = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
MIXTRAL = ("w1.weight", "w3.weight", "w2.weight")
SILU = ("silu", "swish")


@dataclass(frozen=True)
class Family:
    """One ``model_type``. Names of weights are relative to ``layers.N.<block>``; of several, any may be there.

    Attributes:
        score_func: of the router.
        route_norm: whether scores are divided by their sum; None where ``norm_topk_prob`` says it.
        scale: the field that holds the factor of the scores, if there is one.
        group_score_top_k: how many experts tell what a group of ``n_group`` is worth; 0 where there are no groups.
        block: names of the layer's module. router: of the router's weight. bias: of the router's bias for the choice.
        each: one expert's gate, up and down matrices. fused: those of all experts, with gate and up in one.
        shared: the shared expert's module; its matrices have the names of ``LLAMA``.
        shared_gate: the weight of the gate on its output.
        defaults: values of fields that a configuration may leave out.
        allowed: the values that fields may have beside nothing, added to ``ALWAYS``; others mean another layer.
    """

    score_func: str = "softmax"
    route_norm: bool | None = None
    scale: str = ""
    group_score_top_k: int = 0
    block: tuple[str, ...] = ("mlp",)
    router: tuple[str, ...] = ("gate.weight",)
    bias: tuple[str, ...] = ()
    each: tuple[str, str, str] = LLAMA
    fused: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    shared: str = ""
    shared_gate: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# The activation, noise on the inputs while training, and biases of the experts.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "hidden_act": SILU,
    "router_jitter_noise": (0,),
    "mlp_bias": (False,),
    "use_bias": (False,),
}


def _qwen(norm: bool, **others: Any) -> Family:
    return Family(defaults={"norm_topk_prob": norm}, **others)


def _deepseek(norm: bool = True, scale: float = 1.0, shared: str = "shared_experts", **others: Any) -> Family:
    """The router of DeepSeek-V3: sigmoid, groups, a bias for the choice."""
    return Family(
        score_func="sigmoid",
        scale="routed_scaling_factor",
        group_score_top_k=2,
        bias=("gate.e_score_correction_bias", "e_score_correction_bias"),
        shared=shared,
        defaults={"norm_topk_prob": norm, "routed_scaling_factor": scale, "n_group": 1, "topk_group": 1, **others},
        allowed={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
    )


FAMILIES: dict[str, Family] = {
    "mixtral": Family(route_norm=True, block=("mlp", "block_sparse_moe"), each=MIXTRAL),
    "minimax": Family(route_norm=True, block=("mlp", "block_sparse_moe"), each=MIXTRAL),
    "minimax_m2": Family(
        score_func="sigmoid",
        route_norm=True,
        block=("mlp", "block_sparse_moe"),
        each=MIXTRAL,
        bias=("e_score_correction_bias",),
        allowed={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
    ),
    "qwen2_moe": _qwen(False, shared="shared_expert", shared_gate="shared_expert_gate.weight"),
    "qwen3_moe": _qwen(False),
    "qwen3_next": _qwen(True, shared="shared_expert", shared_gate="shared_expert_gate.weight"),
    "olmoe": _qwen(False),
    "flex_olmo": _qwen(False),
    "granitemoe": Family(
        route_norm=True,  # a softmax over the chosen logits is one over all, divided by the chosen ones' sum
        block=("block_sparse_moe",),
        router=("router.weight", "router.layer.weight"),
        fused=(("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight")),
    ),
    "deepseek_v2": Family(
        route_norm=False,
        scale="routed_scaling_factor",
        group_score_top_k=1,
        shared="shared_experts",
        defaults={"routed_scaling_factor": 1.0, "topk_method": "greedy"},
        allowed={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),  # transformers' block does not read it
        },
    ),
    "deepseek_v3": _deepseek(scale=2.5, n_group=8, topk_group=4),
    "deepseek_v32": _deepseek(scale=2.5, n_group=8, topk_group=4),
    "glm4_moe": _deepseek(),
    "glm4_moe_lite": _deepseek(scale=1.8),
    "glm_moe_dsa": _deepseek(scale=2.5),
    "dots1": _deepseek(norm=False),
    "exaone_moe": _deepseek(scale=2.5),
    "solar_open": _deepseek(),
    "mimo_v2_flash": _deepseek(shared=""),
    "ernie4_5_moe": Family(
        route_norm=True,
        bias=("gate.moe_statics.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
        shared="shared_experts",
    ),
}
# The least sum of scores that ERNIE divides by. Sums of chosen probabilities are larger than this one.
LEAST_NORM = 1e-12


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family of a configuration. Raises ConfigError if there is none."""
    name = fields.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type is {name!r}, whose MoE layer is not known to be what MoE computes; known are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def moe_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``MoE`` for the MoE layers of a configuration.

    Args:
        fields: of ``read_fields``.

    Raises:
        ConfigError: fields that are missing, or whose values the layer cannot express; all of them by their names.
    """
    family = family_of(fields)
    given = {**family.defaults, **{name: value for name, value in fields.items() if value is not None}}
    sizes = read_layer_sizes(given)
    problems = [
        f"{name} is {given[name]!r}; expected {' or '.join(map(repr, values))}"
        for name, values in {**ALWAYS, **family.allowed}.items()
        if name in given and given[name] not in values
    ]
    if given.get("moe_norm_min", 0) > LEAST_NORM:
        problems.append(f"moe_norm_min is {given['moe_norm_min']}; expected at most {LEAST_NORM}")
    if sizes.shared_hidden_dim and not family.shared:
        problems.append("shared experts are configured, and this family's layer has none")
    if sizes.shared_hidden_dim and bool(family.shared_gate) != sizes.shared_gate:
        problems.append(
            f"shared_expert_intermediate_size is {given.get('shared_expert_intermediate_size')!r}; expected a size "
            "for families whose shared expert has a gate, and none for the others"
        )
    if sizes.shared_hidden_dim % sizes.hidden_dim:
        problems.append(
            f"shared_expert_intermediate_size ({sizes.shared_hidden_dim}) is no multiple of moe_intermediate_size "
            f"({sizes.hidden_dim})"
        )
    if problems:
        raise ConfigError(f"{fields['model_type']}: MoE cannot express " + "; ".join(problems))
    return {
        "dim": sizes.dim,
        "hidden_dim": sizes.hidden_dim,
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
        "num_shared_experts": sizes.shared_hidden_dim // sizes.hidden_dim,
        "shared_gate": bool(sizes.shared_hidden_dim) and sizes.shared_gate,
        "bias_update_rate": 0.0 if family.bias else None,
        "score_func": family.score_func,
        "route_norm": bool(given["norm_topk_prob"]) if family.route_norm is None else family.route_norm,
        "route_scale": float(given[family.scale]) if family.scale else 1.0,
        **_groups(family, given),
    }


def _groups(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of experts, where a token may not use all of them."""
    used = family.group_score_top_k and given.get("topk_method", "noaux_tc") != "greedy"
    if not used:
        return {}
    missing = [name for name in ("n_group", "topk_group") if name not in given]
    if missing:
        raise ConfigError(f"{given['model_type']}: topk_method {given['topk_method']!r} needs {' and '.join(missing)}")
    if given["n_group"] == given["topk_group"]:
        return {}
    return {
        "num_expert_groups": given["n_group"],
        "num_limited_groups": given["topk_group"],
        "group_score_top_k": family.group_score_top_k,
    }
