"""MoE layers made of Hugging Face configurations and filled from Hugging Face folders compute what transformers' own
blocks compute, on ranks of both frameworks."""

import importlib.util
import json
import subprocess
import sys

import pytest

from hyper_parallel.huggingface.families import FAMILIES
from tests.conftest import REQUIRED
from tests.distributed import huggingface_moe_cases as cases
from tests.distributed.huggingface_moe_configs import CONFIGS
from tests.harness.parity import assert_close, worst

LIMIT = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders and results of transformers, by a process of its own: the ranks of MindSpore need no torch."""
    if importlib.util.find_spec("transformers") is None:
        if REQUIRED:
            raise RuntimeError("transformers is not installed; it belongs to the extra [test]")
        pytest.skip("transformers is not installed")
    out = tmp_path_factory.mktemp("huggingface")
    command = [sys.executable, "-m", "tests.distributed.huggingface_moe_reference", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_family(pool, folders, name):
    assert_close(pool.run(cases.errors, out=str(folders), name=name), LIMIT)


@pytest.mark.parametrize(
    "style,shared",
    [
        ("ExpertTensorParallel", False),
        ("DedupExpertTensorParallel", True),
        ("SplitExpertTensorParallel", True),
        ("ExpertParallel", True),
        ("TensorParallel", False),
    ],
)
def test_every_style(torch_pool, folders, style, shared):
    assert_close(torch_pool.run(cases.errors, out=str(folders), name="qwen2_moe", style=style, shared=shared), LIMIT)


@pytest.mark.parametrize(
    "name,change",
    [
        ("olmoe", {"each": ("up_proj.weight", "gate_proj.weight", "down_proj.weight")}),
        ("mixtral", {"route_norm": False}),
        ("glm4_moe", {"scale": ""}),
        ("deepseek_v2 groups", {"group_score_top_k": 2}),
        ("minimax_m2", {"bias": ()}),
    ],
)
def test_a_wrong_table_would_be_seen(torch_pool, folders, name, change):
    found = worst(torch_pool.run(cases.errors, out=str(folders), name=name, change=change))
    assert found["output"] > 1e-2 and found["experts.w1"] > 1e-2


def test_other_dtypes(pool, folders):
    for same, changed in pool.run(cases.narrowed, folder=str(folders / "glm4_moe" / "each")):
        assert same and changed > 100


@pytest.mark.slow
def test_every_family_is_compared_and_has_the_defaults_of_transformers(folders):
    assert {name.split()[0] for name in CONFIGS} == set(FAMILIES)
    defaults = json.loads((folders / "defaults.json").read_text())
    assert defaults == {name: dict(family.defaults) for name, family in FAMILIES.items()}
