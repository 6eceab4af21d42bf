"""Sizes read from configurations: the parameters are those of transformers' own models, counted on the meta device.

``families.json`` holds configurations as transformers 5.24 writes them, with the parameters of its models.
"""

import json
from pathlib import Path

import pytest

from hyper_parallel.plan import ConfigError, read_config

FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
# A frozen bias of the router for each expert of 27 layers, which this library keeps in a buffer.
BUFFERS_IN_OTHERS = {"ernie4_5_moe": 27 * 64}
MIXTRAL = FAMILIES["mixtral"]["config"]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family):
    found = FAMILIES[family]
    model = read_config(found["config"])
    assert model.parameters() == found["parameters"] - BUFFERS_IN_OTHERS.get(family, 0)
    assert model.expert_parameters() == found["experts"]


def test_a_file_a_folder_and_its_content_are_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    assert read_config(path) == read_config(tmp_path) == read_config(MIXTRAL) == read_config(str(path))


def test_unknown_fields_that_matter_are_named():
    with pytest.raises(ConfigError, match=r"index_n_heads=64.*zero_expert_num=8"):
        read_config({**MIXTRAL, "index_n_heads": 64, "zero_expert_num": 8})


def test_unknown_fields_that_are_off_or_of_no_size_do_not_matter():
    given = {**MIXTRAL, "zero_expert_num": 0, "index_n_heads": None, "router_aux_loss_coef": 0.1, "rope_theta": 1e6}
    assert read_config(given) == read_config(MIXTRAL)


def test_layers_that_are_not_attention_are_named():
    with pytest.raises(ConfigError, match="linear_attention"):
        read_config({**MIXTRAL, "layer_types": ["linear_attention", "full_attention"]})


@pytest.mark.parametrize("missing", ["num_experts_per_tok", "num_local_experts", "hidden_size", "vocab_size"])
def test_a_missing_size_is_named(missing):
    with pytest.raises(ConfigError, match=missing):
        read_config({name: value for name, value in MIXTRAL.items() if name != missing})


@pytest.mark.parametrize(
    "fields,moe_layers",
    [
        ({"first_k_dense_replace": 3}, 29),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 15),
        ({"decoder_sparse_step": 2}, 16),
        ({"mlp_only_layers": [0, 5]}, 30),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 30, "moe_layer_interval": 1}, 30),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 30}, 30),
        ({"moe_layer_freq": [0] + [1] * 31}, 31),
    ],
    ids=str,
)
def test_which_layers_are_moe_layers(fields, moe_layers):
    model = read_config({**MIXTRAL, **fields})
    assert (model.num_moe_layers, model.num_dense_layers) == (moe_layers, 32 - moe_layers)


def test_what_is_not_counted_is_said():
    assert "num_nextn_predict_layers=1" in read_config(FAMILIES["deepseek_v3"]["config"]).notes[0]
    assert "new_moe" in read_config({**MIXTRAL, "model_type": "new_moe"}).notes[0]
    assert not read_config(MIXTRAL).notes
