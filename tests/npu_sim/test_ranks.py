"""Experts over four ranks with HCCL: equal to one device in float64, and no worse in half precision than one device."""

import pytest

from tests.distributed import expert_cases
from tests.harness import oracle, parity
from tests.npu_sim import cases

MESHES = [(2, 2), (1, 4), (4, 1)]
# float32 runs torch's own operators, half precision those of torch_npu.
LIMITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
ROUTINGS = {
    "uneven": lambda ep: problem(ep),
    "one rank has no rows": lambda ep: problem(ep, [0] * (ep - 1) + [48]),
    "one expert has all": lambda ep: problem(ep, counts=[[0, 0, 0, 0, 0, 12, 0, 0]] * ep),
    "one row": lambda ep: problem(ep, [0] * (ep - 1) + [1]),
    "no rows": lambda ep: problem(ep, 0),
}


def problem(ep, rows=48, counts=None):
    """Eight experts; large enough that the gradient of a rank's part is not that of a few rows, rounded."""
    return oracle.make_problem(ep, 8, 16, 32, rows, counts)


def assert_agrees(pool, measured, dtype, ep, tp, rows, with_scores=True):
    results = pool.run(
        cases.errors, dtype=dtype, style="ExpertTensorParallel", ep=ep, tp=tp, problem=rows, with_scores=with_scores
    )
    measured(parity.worst(results), dtype)
    parity.assert_close(results, LIMITS[dtype])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("ep,tp", MESHES)
def test_one_device(npu_pool, measured, ep, tp, dtype, routing):
    assert_agrees(npu_pool, measured, dtype, ep, tp, ROUTINGS[routing](ep))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("ep,tp", MESHES)
def test_one_device_without_scores(npu_pool, measured, ep, tp, dtype):
    assert_agrees(npu_pool, measured, dtype, ep, tp, problem(ep), with_scores=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ep,tp", MESHES)
def test_half_precision_costs_no_more_than_on_one_device(npu_pool, ep, tp, dtype):
    common = {"dtype": dtype, "ep": ep, "tp": tp, "problem": problem(ep)}
    found = parity.worst(npu_pool.run(cases.errors, style="ExpertTensorParallel", **common))
    alone = parity.worst(npu_pool.run(cases.errors_of_one_device, **common))
    assert all(found[name] < 1.5 * alone[name] for name in alone if name != "loss"), (found, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "ep,tp,fault,wrong",
    [
        (2, 2, "drop_tp_sum", {"output", "scores"}),
        (1, 4, "drop_gradient_sum", {"x", "scores"}),
        (2, 2, "keep_rank_major", {"output", "x", "w1"}),
    ],
)
def test_a_fault_is_seen(npu_pool, ep, tp, dtype, fault, wrong):
    """The comparison above fails when the library is broken on purpose."""
    results = npu_pool.run(
        cases.errors,
        dtype=dtype,
        style="ExpertTensorParallel",
        ep=ep,
        tp=tp,
        problem=problem(ep),
        breaks=(fault,),
    )
    worst = parity.worst(results)
    assert all(worst[name] > 0.1 for name in wrong), worst
    with pytest.raises(AssertionError, match="relative errors above"):
        parity.assert_close(results, LIMITS[dtype])


def test_a_fault_in_the_grouped_product_is_seen_where_it_runs(npu_pool):
    arguments = {"style": "ExpertTensorParallel", "ep": 2, "tp": 2, "problem": problem(2), "misorder_experts": True}
    worst = parity.worst(npu_pool.run(cases.errors, dtype="bfloat16", **arguments))
    assert all(worst[name] > 0.1 for name in ("output", "x", "scores", "w1", "w2", "w3")), worst
    parity.assert_close(npu_pool.run(cases.errors, dtype="float32", **arguments), LIMITS["float32"])


def test_swapped_splits_are_refused(npu_pool):
    for message in npu_pool.run(cases.swapped_splits, problem=problem(4)):
        assert message is not None


def test_everything_is_on_the_npu_and_over_hccl(npu_pool):
    for rank, found in enumerate(npu_pool.run(cases.backends, ep=2, tp=2)):
        assert found["device"] == "npu" and found["groups"] == {"hccl"} and found["weights"] == {"npu"}
        assert found["classes"] == {"ProcessGroupHCCL"}
        assert found["device_index"] == rank


@pytest.mark.parametrize("ep,tp", MESHES)
def test_dispatch_and_combine_stay_within_ep(npu_pool, ep, tp):
    results = npu_pool.run(expert_cases.collectives, style="ExpertTensorParallel", ep=ep, tp=tp, problem=problem(ep))
    for found in results:
        inside = [ranks for _, ranks, step in found["calls"] if step]
        assert all(ranks == found["ep"] for ranks in inside) and bool(inside) == (ep > 1)
        assert any(ranks == found["tp"] for _, ranks, step in found["calls"] if not step) == (tp > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("style", ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"])
@pytest.mark.parametrize("ep,tp", MESHES)
def test_moe_layer(npu_pool, measured, ep, tp, style, dtype):
    results = npu_pool.run(cases.moe_layer, dtype=dtype, style=style, ep=ep, tp=tp, top_k=2, shared=True)
    measured(parity.worst(results), dtype)
    parity.assert_close(results, LIMITS[dtype])


def test_layout(npu_pool):
    for found in npu_pool.run(expert_cases.layout, style="ExpertTensorParallel", ep=2, tp=2, problem=problem(2)):
        for weight in found.values():
            assert weight["placements_ours"] and weight["local_right"] and weight["gathered_right"]


def test_debug_mode(npu_pool):
    for message in npu_pool.run(expert_cases.debug_digests, ep=2, tp=2, problem=problem(2)):
        assert "those of tp coordinates [1] differ" in message


def test_gradients_with_stride_zero_and_inputs_that_are_not_contiguous(npu_pool):
    for dtype in LIMITS:
        results = npu_pool.run(cases.odd_inputs, dtype=dtype, ep=2, tp=2, problem=problem(2))
        assert max(error for errors in results for error in errors) < LIMITS[dtype]
