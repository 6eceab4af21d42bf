"""Adapters on the experts of Hugging Face's models compute, learn, and are saved as PEFT's on one device."""

import importlib.util

import pytest

from tests.distributed.test_huggingface import LIMIT
from tests.harness import parity
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.lora_huggingface_cases")
BOTH = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    "family,style,ep,tp,targets",
    [
        ("Mixtral", "ExpertTensorParallel", 2, 2, BOTH),
        ("Qwen3Moe", "ExpertTensorParallel", 1, 4, BOTH),
        ("GptOss", "ExpertTensorParallel", 2, 2, BOTH),
        ("Olmoe", "ExpertTensorParallel", 4, 1, BOTH),
        ("GptOss", "TensorParallel", 1, 4, BOTH),
        ("Qwen3Moe", "ExpertParallel", 4, 1, ("down_proj",)),
        ("Mixtral", "DedupExpertTensorParallel", 2, 2, ("gate_up_proj",)),
        ("Mixtral", "SplitExpertTensorParallel", 2, 2, BOTH),
    ],
)
def test_models_of_hugging_face(hf_pool, tmp_path, family, style, ep, tp, targets):
    more = {"family": family, "style": style, "ep": ep, "tp": tp, "targets": targets}
    limit = LIMIT if family == "Mixtral" else 1e-12  # Mixtral's router takes its softmax in float32
    parity.assert_close(hf_pool.run(cases.trained, folder=tmp_path, **more, time_limit_s=200), limit)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_saved_and_merged(hf_pool, tmp_path, family):
    results = hf_pool.run(cases.saved_and_merged, folder=tmp_path, family=family, time_limit_s=200)
    assert [wrong for wrong, _ in results] == [[]] * 4
    parity.assert_close([errors for _, errors in results], LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_peft_reads_and_writes_the_same(hf_pool, tmp_path, family):
    results = hf_pool.run(cases.with_peft, folder=tmp_path, family=family, time_limit_s=200)
    parity.assert_close(results, LIMIT)


def test_gradients_are_terms_of_a_sum_over_tp(hf_pool, tmp_path):
    more = {"family": "GptOss", "style": "ExpertTensorParallel", "ep": 2, "tp": 2, "broken": True}
    worst = parity.worst(hf_pool.run(cases.trained, folder=tmp_path, **more, time_limit_s=200))
    wrong = {name for name, error in worst.items() if name.startswith("gradient of") and error > 0.1}
    whole = [f"{layer}.mlp.experts.{end}" for layer in (0, 1) for end in ("base_layer.lora_A.weight", "lora_B.weight")]
    assert wrong == {f"gradient of base_model.model.model.layers.{name}" for name in whole}
    assert worst["logits"] < LIMIT and worst["logits after"] > LIMIT
