"""Models of Hugging Face whose experts are cut over ranks compute, and learn, what they do on one device."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.harness import parity
from tests.harness.by_name import CasesOf
from tests.harness.pool import ROOT

cases = CasesOf("tests.distributed.huggingface_cases")
# These models take softmax and norms in float32, whatever their weights are.
LIMIT = 1e-5

family_cases = CasesOf("tests.distributed.huggingface_family_cases")
# Modules of this form that are refused, and the word of the message that says why.
REFUSED = {
    "InklingSharedExperts": "takes",  # called without ids: every token goes through all of them
    "Llama4TextExperts": "takes",  # called with the rows of all experts
    "LongcatFlashExperts": "expected shapes",  # two weights for different numbers of experts
    "MuseSparkExperts": "post_expert_norm",  # a norm of each expert's whole output
}
# Whatever the weights are, these compute in float32 between the two products, or all of it.
FLOAT32_INSIDE = ("BeamExperts", "Inkling2Experts", "Inkling2LoopExperts", "OpenAIPrivacyFilterExperts")


def families():
    """(family, module, class) of each class of the installed transformers with parameters ``down_proj`` and
    ``gate_up_proj`` or ``up_proj``, as its text says: nothing is imported here."""
    found = []
    for path in sorted(Path(importlib.util.find_spec("transformers").origin).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "self.down_proj = nn.Parameter(" not in source and "self.down_proj = torch.nn.Parameter(" not in source:
            continue
        for node in ast.parse(source).body:
            parameters = parameters_of(node) if isinstance(node, ast.ClassDef) else ()
            if "down_proj" in parameters and ("gate_up_proj" in parameters or "up_proj" in parameters):
                found.append((path.parent.name, path.stem, node.name))
    return found


def parameters_of(node):
    return {
        line.targets[0].attr
        for line in ast.walk(node)
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Attribute)
        and "nn.Parameter(" in ast.unparse(line.value)
    }


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
    more |= {"implementation": "counted", "checkpointing": True}
    results = hf_pool.run(cases.model_errors, **more, time_limit_s=200)
    parity.assert_close([errors for errors, _ in results], LIMIT)
    assert all(len(calls) == 4 and min(calls) > 0 for _, calls in results)  # one a layer, and once more


def test_gate_and_up_cut_as_they_lie_are_wrong(hf_pool):
    assert min(hf_pool.run(cases.cut_as_it_lies, ep=2, tp=2)) > 0.1


def test_state_dicts_are_hugging_faces(hf_pool, tmp_path):
    assert hf_pool.run(cases.state_dicts, folder=str(tmp_path), time_limit_s=200) == [[]] * 4


def test_our_checkpoints_hold_hugging_faces_shapes(hf_pool, tmp_path):
    assert hf_pool.run(cases.our_checkpoints, folder=str(tmp_path), time_limit_s=200) == [[]] * 4
    pieces = json.loads((tmp_path / "cut" / "checkpoint.json").read_text(encoding="utf-8"))
    assert '"shape": [8, 48, 16]' in json.dumps(pieces)  # [E, 2H, D]


def test_every_family_of_the_installed_transformers(hf_pool):
    """Whatever holds packed experts computes and learns what it does on one device, or is refused with the reason."""
    found = families()
    assert len(found) > 60
    per_rank = hf_pool.run(family_cases.family_errors, families=found, time_limit_s=250)
    refused = {name: words for (_, _, name), words in zip(found, per_rank[0]) if isinstance(words, str)}
    assert set(refused) == set(REFUSED)
    assert all(words in refused[name] for name, words in REFUSED.items())
    taken = {"SwiGLU": set(), "others": set()}
    for (family, _, name), *ranks in zip(found, *per_rank):
        if name not in refused:
            taken["SwiGLU" if ranks[0][0] else "others"].add(family)
            limit = LIMIT if name in FLOAT32_INSIDE else 1e-12
            bad = {what: error for _, errors in ranks for what, error in errors.items() if not error < limit}
            assert not bad, (family, name, bad)
    told = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in told for name in refused)
    table = dict(re.findall(r"^\| (SwiGLU|others) \| (.*) \|$", told, re.M))
    assert {kind: set(re.findall(r"`(\w+)`", names)) for kind, names in table.items()} == taken
