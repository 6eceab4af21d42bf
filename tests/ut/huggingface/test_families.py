"""The arguments of ``MoE`` from configurations, and what is refused. The numbers are compared on ranks."""

import json
from pathlib import Path

import pytest

from hyper_parallel.huggingface.families import FAMILIES, moe_arguments
from hyper_parallel.plan.config import ConfigError, read_fields

PUBLISHED = json.loads((Path(__file__).parents[1] / "plan" / "families.json").read_text(encoding="utf-8"))
SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {**SMALL, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}


def test_arguments_of_deepseek_v3():
    assert moe_arguments(PUBLISHED["deepseek_v3"]["config"]) == {
        "dim": 7168,
        "hidden_dim": 2048,
        "num_experts": 256,
        "top_k": 8,
        "num_shared_experts": 1,
        "shared_gate": False,
        "bias_update_rate": 0.0,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
        "num_expert_groups": 8,
        "num_limited_groups": 4,
        "group_score_top_k": 2,
    }


def test_arguments_of_qwen2_moe():
    assert moe_arguments(PUBLISHED["qwen2_moe"]["config"]) == {
        "dim": 2048,
        "hidden_dim": 1408,
        "num_experts": 60,
        "top_k": 4,
        "num_shared_experts": 4,
        "shared_gate": True,
        "bias_update_rate": None,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 1.0,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_taken_or_refused_by_name(name):
    config = PUBLISHED[name]["config"]
    if name in FAMILIES:
        assert moe_arguments(config)["dim"] == config["hidden_size"]
    else:
        with pytest.raises(ConfigError, match=f"model_type is '{name}'.*known are mixtral"):
            moe_arguments(config)


def test_a_file_a_folder_an_object_and_a_part_are_the_same(tmp_path):
    class Config:
        def to_dict(self):
            return dict(DEEPSEEK)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "seeing", "text_config": DEEPSEEK}))
    for given in (tmp_path, str(tmp_path / "config.json"), Config(), {"text_config": DEEPSEEK}):
        assert read_fields(given) == DEEPSEEK


@pytest.mark.parametrize(
    "family,fields,words",
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "needs n_group and topk_group"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False; expected True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1, "use_bias": True}, "use_bias is True.*moe_norm_min is 0.1"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 12},
            r"shared_expert_intermediate_size \(12\) is no multiple",
        ),
        ("qwen2_moe", {"n_shared_experts": 1}, "shared_expert_intermediate_size is None"),
        ("glm4_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
        ("olmoe", {"n_shared_experts": 1}, "shared experts are configured"),
        ("qwen3_moe", {"num_experts": None}, "num_experts, num_local_experts.*is needed"),
    ],
)
def test_what_the_layer_cannot_be_is_refused_by_its_field(family, fields, words):
    assert moe_arguments({**SMALL, "model_type": family})["dim"] == 16
    with pytest.raises(ConfigError, match=words):
        moe_arguments({**SMALL, "model_type": family, **fields})
