"""What docs/adding_a_style.md says: its style, and the meshes that a style's own dispatch is given."""

import pytest

from tests.distributed import style_cases as cases
from tests.harness import oracle, parity
from tests.harness.frameworks import framework


@pytest.mark.parametrize("ep,tp", [(2, 2), (4, 1), (1, 4)])
def test_the_style_of_the_page(pool, ep, tp):
    results = pool.run(cases.against_one_device, ep=ep, tp=tp, top_k=3, num_tokens=(5, 0, 9, 2), shared=True)
    parity.assert_close(results, framework(pool.platform).tolerance)


def test_negative_control(pool):
    results = pool.run(cases.against_one_device, ep=2, tp=2, top_k=3, broken=True)
    assert parity.worst(results)["output"] > 0.1


def test_a_dispatch_of_bare_experts_is_given_the_real_mesh(pool):
    problem = oracle.make_problem(2, 4, 6, 8)
    for is_mesh, names, size, message in pool.run(cases.overriding_dispatch, problem=problem):
        assert is_mesh and names == ("ep",) and size == 2
        assert message.startswith("experts: Mine replaces the dispatch of bare experts only")
        assert "make_exchange" in message


def test_an_error_in_a_call_names_the_module(pool):
    for message in pool.run(cases.named_errors):
        assert message.startswith("layers.1.experts: x must have shape [rows, 4], got (1, 1)")
