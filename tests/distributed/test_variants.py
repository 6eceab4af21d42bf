"""The styles that send fewer bytes: the parity suite of a MoE layer, and what they send."""

import pytest

from tests.distributed import variant_cases as cases
from tests.harness import oracle, parity
from tests.harness.frameworks import framework

STYLES = ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"]
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize("ep,tp", MESHES)
@pytest.mark.parametrize("style", STYLES)
def test_one_device(pool, style, ep, tp):
    results = pool.run(cases.against_one_device, style=style, ep=ep, tp=tp, top_k=3)
    parity.assert_close(results, framework(pool.platform).tolerance)


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("style", STYLES)
def test_score_positions_and_a_shared_expert(pool, style, position):
    arguments = {"style": style, "ep": 2, "tp": 2, "top_k": 2, "shared": True, "score_position": position}
    parity.assert_close(pool.run(cases.against_one_device, **arguments), framework(pool.platform).tolerance)


@pytest.mark.parametrize("num_tokens", [(15,), (1,), (7, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_token_numbers_that_do_not_divide(pool, style, num_tokens):
    """torchtitan PR 3193: 15 tokens over two tp ranks; here also fewer than tp ranks, and none."""
    arguments = {"style": style, "ep": 2, "tp": 2, "top_k": 2, "num_tokens": num_tokens}
    parity.assert_close(pool.run(cases.against_one_device, **arguments), framework(pool.platform).tolerance)


@pytest.mark.parametrize("style", STYLES[1:])
def test_on_bare_experts_they_are_exact(pool, style):
    problem = oracle.make_problem(2, 4, 6, 8)
    results = pool.run(cases.bare_experts, style=style, ep=2, tp=2, problem=problem)
    parity.assert_close(results, framework(pool.platform).tolerance)


def test_rows_on_the_wire(pool):
    """At ep 2 and four experts per token, a token is sent at most twice instead of four times."""
    arguments = {"ep": 2, "tp": 2, "top_k": 4, "num_tokens": 64}
    sent = {style: pool.run(cases.rows_over_ep, style=style, **arguments) for style in STYLES}
    for exact, dedup, split in zip(*(sent[style] for style in STYLES)):
        rows = {name: dict(of_rank[0]) for name, of_rank in zip(STYLES, (exact, dedup, split))}
        dispatch = {name: of[next(key for key in of if "dispatch" in key)] for name, of in rows.items()}
        assert dispatch["ExpertTensorParallel"] == 4 * 64
        assert dispatch["DedupExpertTensorParallel"] <= 2 * 64
        assert dispatch["SplitExpertTensorParallel"] == 2 * 64  # half of the tokens, all of their rows
        for of in rows.values():  # as many rows leave in dispatch as come back in combine, all ranks together
            assert len(of) == 2


def test_negative_control(pool):
    """A style that leaves its own sum to the layer, or sums twice, is seen."""
    results = pool.run(cases.with_a_second_sum, ep=2, tp=2)
    assert parity.worst(results)["output"] > 0.1
