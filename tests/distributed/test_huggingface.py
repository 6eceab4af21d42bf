"""Models of Hugging Face whose experts are cut over ranks compute, and learn, what they do on one device."""

import importlib.util

import pytest

from tests.harness import parity
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.huggingface_cases")
# These models take softmax and norms in float32, whatever their weights are.
LIMIT = 1e-5


@pytest.fixture
def hf_pool(torch_pool):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: the extra [huggingface]")
    return torch_pool


@pytest.mark.parametrize(
    "family,style,ep,tp,more",
    [
        ("Mixtral", "ExpertTensorParallel", 2, 2, {"checkpointing": True}),
        ("Qwen3Moe", "ExpertTensorParallel", 2, 2, {}),
        ("Olmoe", "ExpertTensorParallel", 2, 2, {}),
        ("DeepseekV3", "ExpertTensorParallel", 2, 2, {"checkpointing": True}),
        ("GptOss", "ExpertTensorParallel", 2, 2, {}),
        ("Mixtral", "ExpertTensorParallel", 4, 1, {}),
        ("GptOss", "ExpertTensorParallel", 1, 4, {}),
        ("Qwen3Moe", "ExpertParallel", 4, 1, {}),
        ("GptOss", "TensorParallel", 1, 4, {}),
        ("DeepseekV3", "DedupExpertTensorParallel", 2, 2, {}),
        ("Olmoe", "SplitExpertTensorParallel", 2, 2, {}),
    ],
    ids=lambda value: "checkpointing" if value == {"checkpointing": True} else str(value),
)
def test_models(hf_pool, family, style, ep, tp, more):
    results = hf_pool.run(cases.model_errors, family=family, style=style, ep=ep, tp=tp, time_limit_s=200, **more)
    parity.assert_close([errors for errors, _ in results], LIMIT)
    errors = results[0][0]
    assert sum(name.endswith(("gate_up_proj", "gate_up_proj_bias")) for name in errors) >= 1
    assert ("auxiliary loss" in errors) == (family == "Mixtral")
    assert len(errors) > 15


def test_a_models_own_implementation_computes_where_experts_are_not_swiglu(hf_pool):
    more = {"family": "GptOss", "style": "ExpertTensorParallel", "ep": 2, "tp": 2, "dtype": "float32"}
    results = hf_pool.run(cases.model_errors, **more, implementation="counted", time_limit_s=200)
    parity.assert_close([errors for errors, _ in results], LIMIT)
    assert all(len(calls) == 2 and min(calls) > 0 for _, calls in results)  # one call a layer


def test_gate_and_up_cut_as_they_lie_are_wrong(hf_pool):
    assert min(hf_pool.run(cases.cut_as_it_lies, ep=2, tp=2)) > 0.1


def test_state_dicts_are_hugging_faces(hf_pool, tmp_path):
    assert hf_pool.run(cases.state_dicts, folder=str(tmp_path), time_limit_s=200) == [[]] * 4
