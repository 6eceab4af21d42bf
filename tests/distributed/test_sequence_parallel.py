"""Sequence parallel: a MoE layer takes its tokens cut over tp and returns them so, and equals one device."""

import pytest

import hyper_parallel as hp
from tests.distributed import sequence_parallel_cases as cases
from tests.harness import parity
from tests.harness.frameworks import framework

ETP = cases.ETP


def tolerance(pool):
    return framework(pool.platform).tolerance


@pytest.mark.parametrize(
    "ep,tp,inputs",
    [(2, 2, "sequence"), (2, 2, "uneven tokens"), (1, 4, "uneven sequence"), (1, 4, "one token")],
)
def test_one_device(pool, ep, tp, inputs):
    """Output, and gradients of tokens, router, experts and shared expert, with every style."""
    results = pool.run(cases.with_every_style, ep=ep, tp=tp, inputs=inputs, time_limit_s=120)
    for style in cases.STYLES:
        parity.assert_close([errors[style] for errors in results], tolerance(pool))


@pytest.mark.parametrize(
    "layouts",
    [
        {"input_layouts": (hp.Replicate(),), "output_layouts": (hp.Shard(1),)},
        {"input_layouts": (hp.Shard(-2),), "output_layouts": (hp.Replicate(),)},
    ],
    ids=["cuts", "gathers"],
)
def test_one_side_cut(pool, layouts):
    styles = (ETP, "SplitExpertTensorParallel")
    arguments = {"ep": 1, "tp": 4, "inputs": "uneven sequence", "layouts": layouts, "styles": styles}
    results = pool.run(cases.with_every_style, **arguments)
    for style in styles:
        parity.assert_close([errors[style] for errors in results], tolerance(pool))


@pytest.mark.parametrize("given", ["cut", "whole"])
def test_dtensors(torch_pool, given):
    """An uneven sequence that says by itself how it is cut: nobody is asked."""
    for errors, asked in torch_pool.run(cases.with_dtensors, given=given):
        assert max(errors.values()) < 1e-12 and asked == 0, errors


@pytest.mark.parametrize(
    "kind,seen",
    [
        ("terms taken for complete", {"x"}),
        ("complete taken for terms", {"x"}),
        ("no sum", {"output", "router.gate.weight"}),
        ("complete summed too", {"output"}),
    ],
)
def test_comparison_sees(pool, kind, seen):
    arguments = {"ep": 2, "tp": 2, "inputs": "uneven sequence", "styles": (ETP,), "breaks": (kind,)}
    worst = parity.worst([errors[ETP] for errors in pool.run(cases.with_every_style, **arguments)])
    assert seen <= {name for name, error in worst.items() if error > 1e-2}


@pytest.mark.parametrize("ep,tp", [(2, 2), (1, 4)])
def test_half_the_bytes_of_the_sums(pool, ep, tp):
    """An all-reduce moves its tokens twice, a reduce-scatter once; what is gathered stays as it was."""
    gather, scatter = {
        "torch": ("all_gather_into_tensor", "reduce_scatter_tensor"),
        "mindspore": ("all_gather", "dist_comm_isend_op"),  # its CPU backend has no reduce-scatter
    }[pool.platform]
    plain, cut = (pool.run(cases.traffic, style=ETP, ep=ep, tp=tp, is_cut=is_cut) for is_cut in (False, True))
    for without, with_style in zip(plain, cut):
        for before, after in zip(without, with_style):
            of_tokens = 16 * cases.DIM * (8 if pool.platform == "torch" else 4) * (tp - 1) / tp
            sums = [size for verb, size, shape in before if verb == "all_reduce" and shape[-1] == cases.DIM]
            assert sums == [2 * of_tokens]
            assert {shape for verb, _, shape in after if verb == "all_reduce"} <= {(16, 2)}  # gradients of scores
            moved = {
                verb: sum(size for other, size, shape in after if other == verb and shape[-1] == cases.DIM)
                for verb in (gather, scatter)
            }
            assert moved == {gather: of_tokens, scatter: of_tokens}


def test_each_sends_its_own_tokens_only(pool):
    """Where each tp rank sends its share over ep anyway, nothing of the output is gathered or scattered."""
    arguments = {"style": "SplitExpertTensorParallel", "ep": 2, "tp": 2}
    plain, cut = (pool.run(cases.traffic, is_cut=is_cut, **arguments) for is_cut in (False, True))
    for without, with_style in zip(plain, cut):
        for before, after in zip(without, with_style):
            assert sum(size for _, size, _ in after) < sum(size for _, size, _ in before)


@pytest.mark.parametrize("names", [("dp", "ep", "tp"), ("dp", "ep")], ids="-".join)
def test_gradients_in_one_call(pool, names):
    """With tp or without, the layer's own gradients are those of one device; a weight in front of it needs tp."""
    worst = parity.worst(pool.run(cases.reduced, names=names))
    of_scale = worst.pop("scale")
    assert max(worst.values()) < tolerance(pool), worst
    assert of_scale < tolerance(pool) if "tp" in names else of_scale > 0.1


def test_refusals(pool):
    words = {
        "no shard": ("ValueError", "expects Shard(dim) for the layer's input, its output, or both"),
        "two dims": ("ValueError", "of one dim"),
        "partial": ("ValueError", "and Replicate() for the other"),
        "two inputs": ("ValueError", "input_layouts of a MoE layer"),
        "no layer": ("TypeError", "expects a MoE layer of hyper_parallel, got GroupedExperts"),
        "other axis": ("ValueError", "names ('tp',), got a 1-D mesh with names ('ep',)"),
        "twice": ("RuntimeError", "has the style already"),
        "last dim": ("ValueError", "Shard(dim=1) is no dim of tokens with 2 dims"),
        "other ranks": ("ValueError", "MoESequenceParallel the tokens over ranks ["),
        "dtypes": ("ValueError", "must call with the same dtype of rows"),
        "batches": ("ValueError", "must agree in every dim but 1"),
    }
    for found in pool.run(cases.refusals):
        local_output = found.pop("local output")
        assert local_output is None if pool.platform == "torch" else "has no DTensor" in local_output[1]
        assert set(found) == set(words)
        for name, (kind, text) in words.items():
            assert found[name][0] == kind and text in found[name][1], (name, found[name])
