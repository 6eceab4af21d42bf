"""Random sizes, routings and settings over real ranks, against one device in numpy.

A failure names its case; `pytest "tests/distributed/test_random.py::test_one_device[torch-137]"` runs that one alone.
"""

import pytest

from tests.distributed import random_cases as cases
from tests.harness import parity

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
SEEDS = range(200)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_device(pool, seed):
    drawn = cases.draw(seed)
    errors = parity.worst(pool.run(cases.errors, seed=seed))
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCES[drawn.dtype]}
    assert not wrong, f"{wrong} in {drawn}"


def test_the_seeds_draw_everything():
    drawn = [cases.draw(seed) for seed in SEEDS]
    layers = [draw for draw in drawn if draw.settings]
    assert {(draw.style, draw.ep, draw.tp) for draw in drawn} == {
        (style, *mesh) for style, meshes in cases.MESHES_OF_STYLES.items() for mesh in meshes
    }
    for of in (layers, [draw for draw in drawn if not draw.settings]):
        assert len(of) > 60
        assert {draw.spread for draw in of} == set(cases.SPREADS) and {draw.tokens for draw in of} == set(cases.TOKENS)
        assert {draw.dtype for draw in of} == set(TOLERANCES)
    assert {draw.with_scores for draw in drawn if not draw.settings} == {False, True}
    assert {(draw.settings.score_position, draw.shared) for draw in layers} == {
        (position, shared) for position in ("before", "inside", "after") for shared in ("none", "replicated", "sharded")
    }
    for score_func in ("softmax", "sigmoid"):
        of = [draw for draw in layers if draw.settings.score_func == score_func]
        assert {draw.settings.route_norm for draw in of} == {draw.with_bias for draw in of} == {False, True}
        assert {draw.settings.num_expert_groups is None for draw in of} == {False, True}
        assert {draw.settings.top_k for draw in of} >= {1, 2, 3}


BROKEN = {
    "drop_tp_sum": lambda draw: draw.tp > 1 and draw.style in ("TensorParallel", "ExpertTensorParallel"),
    "shift_experts": lambda draw: draw.num_experts > 1 and draw.spread == "all to one expert",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_negative_control(pool, kind):
    """A sum over tp that is left out, and experts in each other's place, are seen in whatever is drawn."""
    drawn = [draw for draw in map(cases.draw, SEEDS) if BROKEN[kind](draw) and all(draw.num_tokens)]
    assert len(drawn) > 10
    for draw in drawn[:10]:
        errors = parity.worst(pool.run(cases.errors, seed=draw.seed, breaks=(kind,)))
        assert errors["output"] > 1e-3, draw
