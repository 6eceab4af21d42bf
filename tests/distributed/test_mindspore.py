"""What MindSpore users bring along: recompute, decorated Cells, cells of their own, optimizers, float64."""

from tests.harness import oracle, parity
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.mindspore_cases")
PROBLEM = oracle.make_problem(2, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 0, 8]])
TOLERANCE = 1e-5


def test_recompute(mindspore_pool):
    parity.assert_close(mindspore_pool.run(cases.recomputed, problem=PROBLEM), TOLERANCE)


def test_a_users_cell_takes_the_place_of_grouped_experts(mindspore_pool):
    results = mindspore_pool.run(cases.users_cell, problem=PROBLEM)
    parity.assert_close([errors for errors, _ in results], TOLERANCE)
    assert [calls for _, calls in results] == [1] * 4


def test_decorator(mindspore_pool):
    for asked, shape, instance, below, names in mindspore_pool.run(cases.decorated):
        assert asked == 2 and shape == (2, 4, 6) and instance
        assert below == (4, 8, 6)  # a subclass is parallelised only if it is decorated itself
        assert names == [f"blocks.{block}.{weight}" for block in range(2) for weight in ("w1", "w2", "w3")]


def test_optimizers(mindspore_pool):
    for found in mindspore_pool.run(cases.optimizers, problem=PROBLEM):
        for key, (error, moved) in found.items():
            assert error < TOLERANCE and moved > 1e-3, key


def test_float64(mindspore_pool):
    for dtype, error in mindspore_pool.run(cases.float64, problem=PROBLEM):
        assert dtype == "Float64" and error < 1e-12
