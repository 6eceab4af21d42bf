"""Hooks, recomputation and FSDP2 on a layer's experts; exchanges that recomputation keeps; integers of the host."""

import numpy as np
import pytest

from tests.distributed import around_cases as cases
from tests.harness import parity
from tests.harness.frameworks import framework

STYLES = ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"]
ARGUMENTS = {"ep": 2, "tp": 2, "top_k": 2, "shared": True}


@pytest.mark.parametrize("style", STYLES)
def test_hooks_on_the_experts(pool, style):
    results = pool.run(cases.hooks, style=style, **ARGUMENTS)
    parity.assert_close([errors for errors, _ in results], framework(pool.platform).tolerance)
    assert all(calls == {"before": 1, "after": 1, "backward": 1} for _, calls in results)


def test_a_hook_that_changes_the_output_is_seen(pool):
    results = pool.run(cases.scaling_hook, style="ExpertTensorParallel", ep=2, tp=2, top_k=2)
    assert parity.worst(results)["output"] > 0.5


@pytest.mark.parametrize("how", ["not reentrant", "reentrant"])
@pytest.mark.parametrize("style", STYLES)
def test_experts_that_are_recomputed(pool, style, how):
    if pool.platform == "mindspore" and how == "reentrant":
        pytest.skip("one way to recompute")
    results = pool.run(cases.recomputed, how=how, style=style, **ARGUMENTS)
    parity.assert_close(results, framework(pool.platform).tolerance)


@pytest.mark.parametrize("dp,ep,tp", [(2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("style", STYLES)
def test_fsdp2_on_the_experts(torch_pool, style, dp, ep, tp):
    results = torch_pool.run(cases.fsdp_over_dp, style=style, dp=dp, ep=ep, tp=tp, reshard=ep == 2)
    parity.assert_close(results, 1e-12)


def test_exchanges_that_recomputation_keeps(torch_pool):
    """Counts, rows and scores out and rows back; backward three of them: 7. All of the forward again: 11."""
    plain, whole, selective = (torch_pool.run(cases.all_to_alls, saved=saved) for saved in (None, False, True))
    assert {number for number, _ in plain} == {7} and {number for number, _ in whole} == {11}
    assert {number for number, _ in selective} == {7}
    for (_, expected), (_, found) in zip(plain, selective):
        assert all(np.array_equal(*pair) for pair in zip(expected, found))


def test_integers_made_by_the_host_are_read_for_free(pool):
    for known, free, mixed, copies, made in pool.run(cases.integers_of_the_host):
        assert known == [[3, 1, 2], [4, 5], [6]] and free == 0
        assert mixed == [[7, 8], [3, 1, 2]] and copies == [(2,)]
        assert made == [True, True, True, False]
