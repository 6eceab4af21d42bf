"""MindSpore on Ascend devices, as far as a machine without one can tell.

The operators exist, take the arguments that are used, and have the gradients that are relied on; the code around them
computes what one device computes, with stand-ins that refuse what the operators' documents exclude. What the devices
compute is not tested.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.harness import oracle, parity
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.ascend_cases")
ROOT = Path(__file__).resolve().parents[3]
DTYPES = ("float16", "bfloat16", "float32")
TOLERANCE = 1e-5
# Expert 1 has no rows at all, expert 2 none on the first ep rank.
PROBLEM = oracle.make_problem(2, 4, 6, 8, counts=[[4, 0, 0, 5], [2, 0, 6, 3]])
ALL_TO_ONE = oracle.make_problem(2, 4, 6, 8, counts=[[9, 0, 0, 0], [5, 0, 0, 0]])
NO_ROWS = oracle.make_problem(2, 4, 6, 8, counts=[[0, 0, 0, 0], [2, 3, 1, 3]])


@pytest.fixture(scope="module")
def compiler():
    require("mindspore")
    command = [sys.executable, "-m", "tests.ut.platform.mindspore_compile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function,operator,gradient",
    [
        ("product_of_groups", "GroupedMatmulV4", "GroupedMatmulV4"),
        ("swiglu_of_halves", "Swiglu", "SwigluGrad"),
        ("sum_of_copies", "InnerMoeTokenUnpermute", "MoeTokenUnpermuteGrad"),
    ],
)
def test_operator_takes_our_arguments_and_has_a_gradient(compiler, function, operator, gradient, dtype):
    found = compiler["compiled"][f"{function} {dtype}"]
    assert found == [f"no kernel: {operator}", f"no kernel: {gradient}"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiler_would_have_said_so(compiler, dtype):
    """A gradient that is not registered, one that the arguments exclude, and shapes that do not fit."""
    forward, gradient = compiler["compiled"][f"without_gradient {dtype}"]
    assert forward == "no kernel: MoeInitRoutingV2" and "bprop not defined" in gradient
    forward, gradient = compiler["compiled"][f"separate_outputs {dtype}"]
    assert forward == "no kernel: GroupedMatmulV4" and "only support 3" in gradient
    assert all("shape should be (e, k, n)" in text for text in compiler["compiled"][f"wrong_shapes {dtype}"])


SIGNATURES = {
    "all_to_all_single": ["output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"],
    "all_reduce": ["tensor", "op", "group", "async_op"],
    "broadcast": ["tensor", "src", "group", "async_op"],
    "all_gather": ["tensor_list", "tensor", "group", "async_op"],
    "create_group": ["group", "rank_ids", "options"],
    "swiglu": ["input", "dim"],
    "moe_token_unpermute": ["permuted_tokens", "sorted_indices", "probs", "padded_mode", "restore_shape"],
    "topk": ["input", "k", "dim", "largest", "sorted"],
    "sort": ["input", "dim", "descending", "stable"],
    "searchsorted": ["sorted_sequence", "values", "out_int32", "right", "side", "sorter"],
    "scatter": ["input", "dim", "index", "src"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(compiler, name):
    assert compiler["signatures"][name] == SIGNATURES[name]


def test_grouped_matmul_has_the_keywords_that_are_used(compiler):
    assert {"group_list", "split_item", "group_type", "group_list_type"} < set(
        compiler["signatures"]["grouped_matmul_v4"]
    )


def test_documents_name_ascend_for_every_operator(compiler):
    assert not [name for name, platforms in compiler["platforms"].items() if "Ascend" not in platforms]


MESHES = [
    ("ExpertTensorParallel", 2, 2),
    ("ExpertTensorParallel", 1, 1),
    ("ExpertParallel", 2, 1),
    ("TensorParallel", 1, 2),
]


@pytest.mark.parametrize("style,ep,tp", MESHES)
@pytest.mark.parametrize("with_scores", [True, False], ids=["scores", "no scores"])
def test_experts(mindspore_pool, style, ep, tp, with_scores):
    problem = PROBLEM if ep == 2 else oracle.make_problem(1, 4, 6, 8, counts=[[4, 0, 7, 5]])
    arguments = {"style": style, "ep": ep, "tp": tp, "problem": problem, "with_scores": with_scores}
    errors, calls = zip(*mindspore_pool.run(cases.experts, **arguments))
    parity.assert_close(errors, TOLERANCE)
    assert all(counts["swiglu"] for counts in calls)
    # A rank whose rows are all of one expert needs no grouped product.
    assert any(counts["grouped_matmul_v4"] for counts in calls)
    assert ep == 1 or all(counts["all_to_all_single"] for counts in calls)


@pytest.mark.parametrize("problem", [ALL_TO_ONE, NO_ROWS], ids=["all to one", "a rank without rows"])
def test_ranks_and_experts_without_rows(mindspore_pool, problem):
    arguments = {"style": "ExpertTensorParallel", "ep": 2, "tp": 2, "problem": problem}
    errors, calls = zip(*mindspore_pool.run(cases.experts, **arguments))
    parity.assert_close(errors, TOLERANCE)
    # Backward sends as often as forward, on every rank: rows and scores there, rows back, and counts once.
    assert {counts["all_to_all_single"] for counts in calls} == {1 + 2 * 3}


def test_a_dropped_sum_is_seen(mindspore_pool):
    arguments = {"style": "ExpertTensorParallel", "ep": 2, "tp": 2, "problem": PROBLEM, "breaks": ("drop_tp_sum",)}
    errors, _ = zip(*mindspore_pool.run(cases.experts, **arguments))
    assert parity.worst(errors)["output"] > 0.1


@pytest.mark.parametrize("style", ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"])
def test_moe_layer(mindspore_pool, style):
    errors, calls = zip(*mindspore_pool.run(cases.moe_layer, style=style))
    parity.assert_close(errors, TOLERANCE)
    for counts in calls:
        assert counts["topk"] and counts["sort"]
        assert counts["moe_token_unpermute"] or style == "DedupExpertTensorParallel"


def test_collectives_agree_with_those_of_the_cpu(mindspore_pool):
    for ascend, cpu in mindspore_pool.run(cases.collectives):
        assert ascend == cpu


def test_routing_operators_agree_with_the_portable_ones(mindspore_pool):
    for ascend, portable in mindspore_pool.run(cases.routing):
        assert ascend == portable


def test_one_copy_to_the_host(mindspore_pool):
    """Both lists of counts together; what the library made of host numbers itself is not copied back."""
    for copies, on_host in mindspore_pool.run(cases.copies_to_host, problem=PROBLEM):
        assert not on_host
        # Counts of four experts, and from two ranks those of two experts with four integers on what they send.
        assert copies == [(4 + 2 * (2 + 4),)]


def test_the_choice_is_logged(mindspore_pool):
    message, names = mindspore_pool.run(cases.chosen)[0]
    rooms = [f"ascend_{room}" for room in ("collectives", "experts", "routing", "rows")]
    assert message == f"mindspore, device target CPU: {', '.join(rooms)}"
    assert names == [f"hyper_parallel.platform.mindspore.{room}" for room in rooms]


def test_check(mindspore_pool):
    assert mindspore_pool.run(cases.whole_check) == [0] * 4
