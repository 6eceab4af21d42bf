"""Adapters on experts that are cut over ranks compute, learn and are saved as on one device."""

import itertools

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed import lora_cases as cases
from tests.distributed.test_refusals import assert_words
from tests.harness import oracle, parity
from tests.harness.by_name import CasesOf

around_cases = CasesOf("tests.distributed.lora_around_cases")

PROBLEM = oracle.make_problem(2, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 0, 8]])
PROBLEMS = {
    2: PROBLEM,
    4: oracle.make_problem(4, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 0, 8], [0, 0, 0, 0], [1, 0, 0, 9]]),
    1: oracle.make_problem(1, 4, 6, 8),
}


def tolerance(pool):
    return 1e-12 if pool.platform == "torch" else 1e-5


@pytest.mark.parametrize(
    "style,ep,tp,targets",
    [
        ("ExpertTensorParallel", 2, 2, cases.WEIGHTS),
        ("ExpertTensorParallel", 4, 1, cases.WEIGHTS),
        ("ExpertTensorParallel", 1, 4, cases.WEIGHTS),
        ("ExpertParallel", 2, 1, cases.WEIGHTS),
        ("TensorParallel", 1, 2, cases.WEIGHTS),
        ("ExpertTensorParallel", 2, 2, ("w2",)),
        ("ExpertTensorParallel", 2, 2, ("w3",)),
    ],
)
def test_experts(pool, style, ep, tp, targets):
    problem = PROBLEMS[ep]
    results = pool.run(cases.errors, style=style, ep=ep, tp=tp, problem=problem, targets=targets)
    parity.assert_close(results, tolerance(pool))


def test_gradients_are_terms_of_a_sum_over_tp(pool):
    """What peers leave out: every rank's own gradient of a factor that it holds whole is wrong, and no value tells."""
    worst = parity.worst(pool.run(cases.errors, style="ExpertTensorParallel", ep=2, tp=2, problem=PROBLEM, broken=True))
    wrong = {name for name, error in worst.items() if error > 0.1}
    assert wrong == {"lora_A_w1", "lora_A_w3", "lora_B_w2"}


def test_a_forward_of_the_users_own(torch_pool):
    """What it computes is not known: it finds the sums in the place of its weights."""
    more = {"ep": 2, "tp": 2, "problem": PROBLEM, "own_forward": True}
    parity.assert_close(torch_pool.run(cases.errors, style="ExpertTensorParallel", **more), 1e-12)


@pytest.mark.parametrize("style", ["DedupExpertTensorParallel", "SplitExpertTensorParallel"])
def test_a_layer(pool, style):
    parity.assert_close(pool.run(cases.of_layer, style=style, ep=2, tp=2), tolerance(pool))


def test_refusals(pool):
    words = {
        "no style": ("ValueError", "no style was applied to any experts", "a mesh of one rank"),
        "nothing to merge": ("ValueError", "the model has no adapters"),
        "nothing to save": ("ValueError", "the model has no adapters"),
        "alpha": ("ValueError", "alpha must be a finite number, got nan"),
        "target": ("ValueError", "['gate_up_proj'] match no weight", "w1, w2, w3"),
        "no target": ("ValueError", "[] match no weight"),
        "no folder": ("CheckpointError", "nowhere/adapter_config.json is missing"),
        "twice": ("RuntimeError", "has adapters already"),
        "style afterwards": ("RuntimeError", "already parallelised by ExpertTensorParallel"),
    }
    other = "adapters: all ranks of the mesh must have the same ones"
    words["r of one rank"] = ("ValueError", f"{other}, but r is 3 on rank 0, rank 2, rank 3, 4 on rank 1; nothing was")
    words["alpha of one rank"] = ("ValueError", f"{other}, but alpha is", "another on rank")
    words["weights of one rank"] = ("ValueError", f"{other}, but weights is", "another on rank")
    words |= {f"r {r}": ("ValueError", "r must be a positive int", f"got {r}") for r in (0, -1, 2.0, True)}
    for found in pool.run(cases.refusals, problem=PROBLEM):
        assert_words(found, words)


def test_what_is_around_it(torch_pool, tmp_path):
    results = torch_pool.run(around_cases.around, folder=tmp_path, time_limit_s=200)
    parity.assert_close([errors for errors, _ in results], 1e-12)
    for _, message in results:
        words = ("ValueError", "w1 no longer lies as ExpertTensorParallel laid it out", "merge there")
        assert_words({"merge": message}, {"merge": words})


def test_16_bits(torch_pool):
    """Factors keep 32 bits beside weights of 16, where small steps would be lost."""
    for dtypes, error, under_autocast, difference in torch_pool.run(around_cases.in_16_bits):
        assert dtypes == {"torch.float32", "torch.bfloat16"} and under_autocast == "torch.bfloat16"
        assert error < 2e-2 and difference < 2e-2


def test_what_is_kept_for_backward(torch_pool):
    """One hidden row more than frozen experts keep; where another forward computes, all weights once more."""
    for kept, weights in torch_pool.run(around_cases.kept):
        assert kept["frozen"] == pytest.approx(2, rel=0.05)
        assert kept["adapted"] == pytest.approx(3, rel=0.05)
        assert kept["own forward"] == pytest.approx(2 + weights, rel=0.05)


def test_refusals_of_torch(torch_pool):
    words = {
        "after FSDP2": (
            "ValueError",
            "w1 no longer lies as ExpertTensorParallel laid it out, as after fully_shard; add",
        ),
        "on meta": ("ValueError", "w1 is on meta", "to_empty"),
    }
    for found in torch_pool.run(around_cases.refused):
        assert_words(found, words)


def test_folders(pool, tmp_path):
    words = {
        "other sizes": (
            "CheckpointError",
            "nothing was changed",
            "base_layer.base_layer.lora_A.weight: (12, 6)",
            "(6, 6)",
        ),
        "fields": (
            "CheckpointError",
            "use_dora is True; lora_dropout is 0.1; target_modules is ['q_proj']; bias is 'all'",
        ),
        "other kind": ("CheckpointError", "peft_type is 'IA3'", "target_parameters is empty"),
        "fewer weights": ("CheckpointError", "base_model.model.base_layer.lora_A.weight: not of these experts"),
        "other rank": ("ValueError", "has adapters of r 2, alpha 6.0 on ['w1', 'w2', 'w3'], the folder r 3"),
    }
    for wrong, found in pool.run(cases.folders, problem=PROBLEM, folder=tmp_path):
        assert not wrong
        assert_words(found, words)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for depth, (a, b) in zip((2, 1, 0), cases.drawn(PROBLEM).values()):
        start = "base_model.model." + "base_layer." * depth
        for e, k in itertools.product(range(4), range(cases.R)):
            assert np.array_equal(stored[f"{start}lora_A.weight"][e * cases.R + k], a[e, k])
            assert np.array_equal(stored[f"{start}lora_B.weight"][:, k * 4 + e], b[e, :, k])
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_recompute_on_mindspore(mindspore_pool):
    assert mindspore_pool.run(cases.recomputed, problem=PROBLEM) == [[True, True]] * 4
