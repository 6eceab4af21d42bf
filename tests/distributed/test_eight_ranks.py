"""Eight ranks: the same experts over every factorisation into ep x tp (vllm-ascend 991)."""

import pytest

from tests.distributed import plan_cases, test_plan, test_training
from tests.harness import oracle, parity
from tests.harness.frameworks import framework


@pytest.mark.parametrize("ep,tp", [(2, 4), (4, 2), (8, 1), (1, 8), (2, 2)])
def test_one_device(big_pool, ep, tp):
    problem = oracle.make_problem(ep, 8, 6, 16)
    results = big_pool.run(parity.errors, style="ExpertTensorParallel", ep=ep, tp=tp, problem=problem)
    parity.assert_close(results, framework(big_pool.platform).tolerance)


@pytest.mark.parametrize(
    "style,ep,tp",
    [(style, ep, tp) for ep, tp in [(8, 1), (1, 8), (2, 4), (4, 2)] for style in test_plan.styles_on(ep, tp)],
)
def test_bytes_of_the_planner(big_pool, style, ep, tp):
    if big_pool.platform != "torch":
        pytest.skip("four ranks of MindSpore are compared in test_plan.py")
    for cut in (False, True)[: 1 + (tp > 1)]:
        one = test_plan.planned(8, style, ep, tp, shared=cut, sequence_parallel=cut)
        more = {"style": style, "ep": ep, "tp": tp, "shared": cut, "sequence_parallel": cut}
        for found in big_pool.run(plan_cases.handed_over, num_tokens=test_plan.TOKENS, **more):
            assert test_plan.total(found) == test_plan.total(test_plan.expected(one))


def test_a_training_step(big_pool):
    """(dp, ep, tp) = (2, 2, 2)."""
    test_training.assert_step(big_pool, big_pool.run(test_training.CASES[big_pool.platform].step, ep=2, tp=2))
