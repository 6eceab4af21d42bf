"""What torch users bring along to a MoE layer: bfloat16, conversions, meta device, compile; and copies to the host."""

from functools import cache

import numpy as np
import pytest

from tests.distributed.moe_cases import VARIANTS
from tests.harness import moe_oracle as oracle
from tests.harness.by_name import CasesOf
from tests.harness.oracle import relative_error

cases = CasesOf("tests.distributed.moe_torch_cases")


@cache
def bfloat16_problems(settings):
    """Several problems, and one device's output and gradients for each."""
    arguments = {"tokens_per_ep_rank": 32, "margin": 0.02, "mantissa_bits": 7}
    problems = [oracle.make_problem(1, settings, seed=seed, **arguments) for seed in range(8)]
    whole = [oracle.one_device(problem) for problem in problems]
    return problems, [{"output": one.outputs[0], "x": one.x_gradients[0], **one.weight_gradients} for one in whole]


@pytest.mark.parametrize("ep,tp,values", [(2, 2, 8 + 2 * (4 + 4)), (1, 4, 8)])
def test_one_host_copy(torch_pool, ep, tp, values):
    """With ep both lists of counts at once; without, the counts by which this device groups its rows."""
    problem = oracle.make_problem(ep, VARIANTS["before"][0])
    for forward, backward in torch_pool.run(cases.host_copies, problem=problem, ep=ep, tp=tp):
        assert [read[1:] for read in forward] == [("cpu", values)] and backward == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_bfloat16(torch_pool, tp, variant):
    """Megatron !2942: sums over tp in bfloat16 may cost half as much again as rounding does on one rank.

    One problem's error scatters by as much; so it is the root mean square over several.
    """
    settings, shared, _ = VARIANTS[variant]
    problems, expected = bfloat16_problems(settings)
    first_rank, *_ = torch_pool.run(cases.in_bfloat16, problems=problems, ep=1, tp=tp, shared=shared)
    for name in expected[0]:
        per_problem = [[relative_error(v[name], e[name]) for v in pair] for pair, e in zip(first_rank, expected)]
        sharded, one = np.sqrt(np.mean(np.square(per_problem), axis=0))
        assert 1e-4 < one < 0.05 and sharded < 1.5 * one, name


def test_expert_bias_stays_float32(torch_pool):
    """Megatron !2895: a bias in bfloat16 loses its updates."""
    problem = oracle.make_problem(1, oracle.Settings())
    dtypes = {"double": "float64", "there and back": "float32", "to device and dtype": "float16"}
    for found in torch_pool.run(cases.dtypes_of_bias, problem=problem):
        for name, (kept, buffers, bias) in found.items():
            gate = dtypes.get(name, "bfloat16")
            assert kept == ["torch.float32", "torch.int64", f"torch.{gate}"], name
            assert buffers == ["expert_bias"]  # the counter is no part of a checkpoint
            np.testing.assert_array_equal(bias, problem.bias)


def test_meta_device(torch_pool):
    for bias, counter in torch_pool.run(cases.from_meta, problem=None):
        assert bias == ("torch.float32", [0.0] * 8) and counter == ("torch.int64", [0] * 8)


def test_compile(torch_pool):
    """torchtitan 2312."""
    problem = oracle.make_problem(2, VARIANTS["before"][0])
    for routings in torch_pool.run(cases.compiled, problem=problem, ep=2, tp=2, time_limit_s=120):
        for plain, fast, load, fast_load in routings:
            assert load == fast_load
            assert relative_error(fast.output, plain.output) < 1e-12
            for name, gradient in fast.parameter_gradients.items():
                assert relative_error(gradient, plain.parameter_gradients[name.removeprefix("_orig_mod.")]) < 1e-12
