"""What torch users bring along: dtypes, autocast, meta device, checkpointing, compile, torch's own parallel API."""

import numpy as np
import pytest

from tests.harness import oracle, parity
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.torch_cases")
PROBLEM = oracle.make_problem(2, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 0, 8]])


def agree(arrays, others, limit=1e-12):
    assert len(arrays) == len(others)
    assert max(oracle.relative_error(a, b) for a, b in zip(arrays, others)) < limit


@pytest.mark.parametrize("dtype,limit", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_dtypes(torch_pool, dtype, limit):
    for found in torch_pool.run(cases.in_dtype, problem=PROBLEM, dtype=dtype):
        for name in ("output", "x", "scores"):
            assert found["etp"][name] < (1e-6 if name == "scores" and limit < 1e-6 else limit)  # scores are float32
            if dtype == "bfloat16":  # rounding once per tp rank costs little over rounding once
                assert found["etp"][name] < 1.5 * found["one"][name]
        assert found["etp"]["dtypes"] == [f"torch.{dtype}"] * 2 + ["torch.float32", f"torch.{dtype}"]


def test_checkpointing(torch_pool):
    for plain, non_reentrant, reentrant in torch_pool.run(cases.checkpointed, problem=PROBLEM):
        agree(non_reentrant, plain)
        agree(reentrant, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(torch_pool, backend):
    for routings in torch_pool.run(cases.compiled, problem=PROBLEM, backend=backend, time_limit_s=120):
        for plain, fast in routings:
            agree(fast, plain)


def test_meta_device(torch_pool):
    """pytorch PR 141731."""
    for was_meta, same, difference, size in torch_pool.run(cases.from_meta):
        assert was_meta and same == [True] * 3
        assert difference < 1e-6 and size > 1e-3


def test_torchs_own_parallelize_module(torch_pool):
    for plain, by_torch, beside, weight in torch_pool.run(cases.torchs_own_parallelize_module, problem=PROBLEM):
        agree(by_torch, plain)
        agree([beside], plain[:1])
        assert weight == "DTensor"


def test_autocast(torch_pool):
    for output, gradient, error in torch_pool.run(cases.autocast, problem=PROBLEM):
        assert output == "torch.bfloat16" and gradient == "torch.float32" and error < 2e-2


def test_a_users_module_takes_the_place_of_grouped_experts(torch_pool):
    results = torch_pool.run(cases.users_module, problem=PROBLEM)
    parity.assert_close([errors for errors, _ in results], 1e-12)
    assert [calls for _, calls in results] == [1] * 4


def test_decorator(torch_pool):
    for asked, shape, instance, below in torch_pool.run(cases.decorated, problem=PROBLEM):
        assert asked == 1 and shape == (2, 4, 6) and instance
        assert below == (4, 8, 6)  # a subclass is parallelised only if it is decorated itself


def test_optimizer_and_clipping(torch_pool):
    for (norm, weights), (one_norm, one_weights) in torch_pool.run(cases.optimizer_and_clipping, problem=PROBLEM):
        assert abs(norm / one_norm - 1) < 1e-12
        agree(weights, one_weights)
        assert not np.allclose(weights[0], PROBLEM.w1)
