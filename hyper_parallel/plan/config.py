"""Reading the sizes of a model from a Hugging Face ``config.json``, by the names of its fields.

Families write the same sizes under different names. A field that looks as if it changed sizes and is not known here is
an error: a plan from half of a model would be believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.plan.model import Attention, Model, grouped_attention, latent_attention

__all__ = ["ConfigError", "LayerSizes", "read_config", "read_fields", "read_layer_sizes"]


class ConfigError(ValueError):
    """A configuration from which no complete model can be read; the message names the fields."""


# Names of one size in different families; the first that is set counts.
NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"),
    "hidden_dim": ("moe_intermediate_size", "intermediate_size"),
    "num_layers": ("num_hidden_layers",),
    "dim": ("hidden_size",),
    "num_shared": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
}
# Norms of q and k that no field tells of: per head, or over all heads.
QK_NORMS = {"qwen3_moe": "head", "dots1": "head", "olmoe": "all", "flex_olmo": "all", "minimax_m2": "all"}
LAYER_NORM_WITH_BIAS = {"phimoe"}
KNOWN_TYPES = {
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"),
    *("olmoe", "flex_olmo", "gpt_oss", "minimax_m2", "ernie4_5_moe", "phimoe", "granitemoe", "dots1"),
}
READ = {name for names in NAMES.values() for name in names} | {
    *("vocab_size", "tie_word_embeddings", "model_type", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_qk_norm"),
    *("attention_bias", "qkv_bias", "use_bias", "lm_head_bias", "shared_expert_intermediate_size"),
    *("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "layer_types"),
    *("num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers"),
}
# They have a word of SIZES in their names and change no size.
WITHOUT_SIZE = {
    *("attention_dropout", "attention_multiplier", "embedding_multiplier", "hidden_act", "hidden_dropout"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "qk_head_dim", "norm_topk_prob", "ep_size"),
    *("moe_norm_min", "moe_router_enable_expert_bias", "use_routing_bias", "topk_method", "topk_group", "n_group"),
    *("chunk_size_feed_forward", "mlp_act", "resid_pdrop", "attn_implementation", "attn_dropout", "moe_use_aux_free"),
    *("moe_router_dtype", "moe_aux_loss_coef", "attn_pdrop", "rms_norm_eps", "layer_norm_eps", "experts_per_token"),
    *("initial_context_length", "experts_implementation", "use_moe", "num_experts_per_group", "qk_norm_type"),
    *("rotary_dim", "max_position_embeddings", "moe_capacity", "moe_gate", "moe_dropout_prob", "use_mtp", "use_cache"),
    *("routed_scaling_factor", "compression_ratio", "swiglu_limit", "attention_probs_dropout_prob"),
    *("hidden_dropout_prob", "moe_use_hard_gate", "moe_gate_act", "attn_window_size", "attn_type_list", "block_size"),
    *("output_hidden_states", "output_attentions", "is_encoder_decoder", "expert_interval"),
}
SIZES = re.compile(
    "expert|moe|layer|head|dim|hidden|size|rank|lora|attn|attention|mlp|ffn|conv|ssm|mamba|linear|index|latent|shared|"
    "nextn|mtp|vocab|bias"
)


def read_config(config: str | Path | Mapping[str, Any] | Any) -> Model:
    """The model that a Hugging Face configuration describes.

    Args:
        config: the path of a ``config.json``, a directory that holds one, or its content; see ``read_fields``.

    Raises:
        ConfigError: fields that are missing, that contradict each other, or that change sizes in a way not known here;
            it names them.
    """
    fields = read_fields(config)
    family = fields.get("model_type", "")
    _refuse_unknown(fields, family)
    num_layers, layer = _need(fields, "num_layers"), read_layer_sizes(fields)
    dim, is_moe = layer.dim, _moe_layers(fields, num_layers)
    of_norm = 2 * dim if family in LAYER_NORM_WITH_BIAS else dim
    biased_experts = family == "gpt_oss"
    return Model(
        name=str(fields.get("_name_or_path") or family or "model"),
        dim=dim,
        hidden_dim=layer.hidden_dim,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        num_moe_layers=sum(is_moe),
        num_dense_layers=num_layers - sum(is_moe),
        attention=_attention(fields, dim),
        vocab_size=_plain(fields, "vocab_size"),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        shared_hidden_dim=layer.shared_hidden_dim,
        shared_gate=dim if layer.shared_gate else 0,
        dense_hidden_dim=0 if all(is_moe) else _plain(fields, "intermediate_size"),
        router_numbers=layer.num_experts * (dim + biased_experts),
        expert_numbers=2 * layer.hidden_dim if biased_experts else 0,
        whole_expert_numbers=dim if biased_experts else 0,
        layer_norms=2 * of_norm,
        final_norms=of_norm,
        head_numbers=fields["vocab_size"] if fields.get("lm_head_bias") else 0,
        notes=_notes(fields, family),
    )


def read_fields(config: str | Path | Mapping[str, Any] | Any) -> dict[str, Any]:
    """The fields of a language model's configuration.

    Args:
        config: the path of a ``config.json``, a directory that holds one, its content, or an object with ``to_dict``,
            as transformers' configurations are. Of a model of several kinds of input, its ``text_config`` counts.
    """
    if isinstance(config, str | Path):
        fields = _load(Path(config))
    else:
        fields = dict(config if isinstance(config, Mapping) else config.to_dict())
    return {**fields["text_config"]} if isinstance(fields.get("text_config"), Mapping) else fields


class LayerSizes(NamedTuple):
    """Sizes of one MoE layer.

    Attributes:
        hidden_dim: of one routed expert. shared_hidden_dim: of the shared experts together, 0 for none.
        shared_gate: a gate multiplies the shared experts' output.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    shared_hidden_dim: int
    shared_gate: bool


def read_layer_sizes(fields: Mapping[str, Any]) -> LayerSizes:
    """Sizes of the MoE layers of a configuration. Raises ConfigError for sizes that are missing, by their names."""
    hidden_dim, own_size = _need(fields, "hidden_dim"), fields.get("shared_expert_intermediate_size")
    number = next((fields[name] for name in NAMES["num_shared"] if fields.get(name)), 0)
    return LayerSizes(
        dim=_need(fields, "dim"),
        hidden_dim=hidden_dim,
        num_experts=_need(fields, "num_experts"),
        top_k=_need(fields, "top_k"),
        shared_hidden_dim=own_size or number * hidden_dim,
        shared_gate=bool(own_size),
    )


def _load(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: expected a JSON object with the fields of a configuration, got {type(found).__name__}"
        )
    return found


def _refuse_unknown(fields: Mapping[str, Any], family: str) -> None:
    unknown = [
        name
        for name, value in fields.items()
        if SIZES.search(name) and name not in READ | WITHOUT_SIZE and value and isinstance(value, int | list | dict)
    ]
    if unknown:
        listed = ", ".join(f"{name}={fields[name]!r}" for name in sorted(unknown))
        raise ConfigError(f"fields of {family or 'this model'} that may change sizes and are not known: {listed}")
    other = sorted(set(fields.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"})
    if other:
        raise ConfigError(f"layer_types holds {', '.join(map(repr, other))}; only layers of attention are known")


def _need(fields: Mapping[str, Any], size: str) -> int:
    """The size under the first of its names that is set."""
    for name in NAMES[size]:
        if fields.get(name) is not None:
            return _plain(fields, name)
    raise ConfigError(f"one of the fields {', '.join(NAMES[size])} is needed, and none is set")


def _plain(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    return value


def _moe_layers(fields: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers are MoE layers."""
    kinds = fields.get("mlp_layer_types")
    if kinds:
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise ConfigError(f'mlp_layer_types must name {num_layers} layers "dense" or "sparse", got {kinds!r}')
        return [kind == "sparse" for kind in kinds]
    if isinstance(fields.get("moe_layer_freq"), list):
        return [bool(sparse) for sparse in fields["moe_layer_freq"]]
    first = fields.get("first_k_dense_replace") or fields.get("moe_layer_start_index") or 0
    last = fields.get("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else last
    every, step = fields.get("moe_layer_freq") or 1, fields.get("decoder_sparse_step") or 1
    interval, dense = fields.get("moe_layer_interval") or 1, set(fields.get("mlp_only_layers") or ())
    return [
        first <= i <= last and i % every == 0 and (i + 1) % step == 0 and (i + 1) % interval == 0 and i not in dense
        for i in range(num_layers)
    ]


def _attention(fields: Mapping[str, Any], dim: int) -> Attention:
    num_heads, family = _plain(fields, "num_attention_heads"), fields.get("model_type", "")
    if fields.get("kv_lora_rank"):
        return latent_attention(
            dim,
            num_heads,
            q_rank=fields.get("q_lora_rank"),
            kv_rank=fields["kv_lora_rank"],
            nope_dim=_plain(fields, "qk_nope_head_dim"),
            rope_dim=_plain(fields, "qk_rope_head_dim"),
            v_dim=_plain(fields, "v_head_dim"),
            bias=bool(fields.get("attention_bias")),
        )
    head_dim = fields.get("head_dim") or dim // num_heads
    qkv_bias = any(fields.get(name) for name in ("attention_bias", "qkv_bias", "use_bias"))
    if family == "qwen2_moe" and "qkv_bias" not in fields:
        qkv_bias = True
    out_bias = bool(fields.get("use_bias")) or (bool(fields.get("attention_bias")) and family in ("gpt_oss", "phimoe"))
    norms = "head" if fields.get("use_qk_norm") and family not in QK_NORMS else QK_NORMS.get(family, "")
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    return grouped_attention(dim, num_heads, num_kv_heads, head_dim, qkv_bias, out_bias, norms, family == "gpt_oss")


def _notes(fields: Mapping[str, Any], family: str) -> tuple[str, ...]:
    notes = []
    for name in ("num_nextn_predict_layers", "num_mtp_modules"):
        if fields.get(name):
            notes.append(f"{name}={fields[name]}: layers that predict further tokens are not counted")
    if family not in KNOWN_TYPES:
        notes.append(f"model_type {family!r} is read by its fields alone: norms of q and k, and biases, may be missing")
    return tuple(notes)
