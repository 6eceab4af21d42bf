"""What used to be silently wrong, or to end an innocent process, is refused with words, before anything changes."""

import numpy as np
import pytest

from tests.distributed import refusal_cases as cases
from tests.harness import oracle

PROBLEM = oracle.make_problem(2, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 0, 8]])


def assert_words(found, words):
    assert found.keys() == words.keys()
    for name, (kind, *parts) in words.items():
        assert found[name] is not None, name
        assert found[name][0] == kind and all(part in found[name][1] for part in parts), (name, found[name])


def test_at_apply(pool):
    for found in pool.run(cases.at_apply, problem=PROBLEM):
        floating = "reduce_dtype must be a floating dtype"
        words = {
            "reduce_dtype int32": ("ValueError", floating, "int32"),
            "reduce_dtype text": ("ValueError", floating, "'float32'"),
            "shared by two layers": ("ValueError", "'layers.0.experts.w1' and 'layers.1.experts.w1' are one parameter"),
            "class in a plan": ("TypeError", "write ExpertTensorParallel() for an object of the class"),
            "star": ("ValueError", "module 'layers'"),  # "*" stands for one name, not for the module itself
            "no subclasses": ("TypeError", "Final takes no subclasses"),
        }
        assert_words(found, words)


def test_of_torch(torch_pool):
    for found in torch_pool.run(cases.of_torch_at_apply, problem=PROBLEM):
        words = {
            "buffer per expert": ("ValueError", "buffer 'gain' of shape (4,) has entries for num_experts"),
            "buffer per hidden": ("ValueError", "buffer 'gain' of shape (2, 8) has entries for hidden_dim"),
            "descending mesh": ("ValueError", "ranks must ascend along every axis", "[[3, 2], [1, 0]]"),
            "dtypes": ("ValueError", "one dtype", "w2 torch.float32"),
            "meta": ("ValueError", "GroupedExperts: rows are on cpu but the experts' weights on meta", "to_empty"),
            "DTensor": ("TypeError", "x must be a plain torch tensor", "to_local()"),
            "width": ("ValueError", "x must have shape [..., 6]", "got (4, 7)"),
        }
        assert_words(found, words)


def test_second_derivatives(torch_pool):
    for found in torch_pool.run(cases.second_derivatives, problem=PROBLEM):
        assert all(message is not None and "once_differentiable" in message[1] for message in found), found


@pytest.mark.parametrize("how", ["dtype", "scores", "gradient"])
def test_all_ranks_of_an_exchange_say_that_they_differ(pool, how):
    if pool.platform == "mindspore" and how == "gradient":
        pytest.skip("nothing on a MindSpore tensor says whether a gradient will come")
    what = {
        "dtype": ("same dtype of rows", "float32 on rank 3, float64 on rank 1"),
        "scores": ("same dtype of scores", "none on rank 3, float64 on rank 1"),
        "gradient": ("same need of a gradient", "absent on rank 3, there on rank 1"),
    }[how]
    if pool.platform == "mindspore":  # its adapter works in float32
        what = {"scores": (what[0], "none on rank 3, float32 on rank 1")}.get(how)
        if what is None:
            pytest.skip("float64 is tried on torch")
    results = pool.run(cases.ranks_that_differ, problem=PROBLEM, how=how, style="ExpertTensorParallel")
    for rank, (found, y) in enumerate(results):
        if rank % 2:
            assert found[0] == "ValueError" and all(words in found[1] for words in what), found
        assert np.isfinite(y).all()
    for rank in (0, 2):  # the call after it is right: both tp ranks agree
        np.testing.assert_array_equal(results[rank][1], results[rank + 1][1])


def test_all_ranks_of_a_mesh_say_that_they_apply_something_else(pool):
    """Also rank 0, which is in none of rank 3's groups; and the groups stay in step."""
    results = pool.run(cases.ranks_that_differ_at_apply, problem=PROBLEM)
    others = "rank 0, rank 1, rank 2"
    for rank, (found, _) in enumerate(results):
        odd = rank == 3
        mine, not_mine = ("another", "DedupExpertTensorParallel") if odd else ("ExpertTensorParallel", "another")
        words = {
            "num_experts": ("ValueError", f"num_experts is 2 on rank 3, 4 on {others}; nothing was changed"),
            "hidden_dim": ("ValueError", f"hidden_dim is 4 on rank 3, 8 on {others}"),
            "dim": ("ValueError", f"dim is 6 on {others}, 8 on rank 3"),
            "style": ("ValueError", f"{mine} on {others}", f"{not_mine} on rank 3"),
            "dtype": ("ValueError", f"dtype of the weights is float16 on rank 3, float32 on {others}"),
        }
        parameters = found.pop("parameters")
        assert_words(found, words)
        if rank % 2:
            assert "but parameters is" in parameters[1] and ("w4 (4, 2)" in parameters[1]) == odd, parameters
    for (_, first), (_, second) in (results[:2], results[2:]):
        np.testing.assert_array_equal(first, second)
        assert np.isfinite(first).all() and np.abs(first).max() > 0.01


def test_debug_mode_and_nan(pool):
    """The same NaN on all ranks is not taken for a difference, and said."""
    for message, records in pool.run(cases.debug_mode, problem=PROBLEM, how="nan"):
        assert message is None
        assert records == ["GroupedExperts: x holds NaN in rows 2"]


def test_debug_mode_sees_permuted_columns(pool):
    for message, _ in pool.run(cases.debug_mode, problem=PROBLEM, how="columns"):
        assert message is not None and "those of tp coordinates [1] differ" in message[1]


def test_wrong_arguments(pool):
    for found in pool.run(cases.wrong_arguments):
        words = {
            "mesh_shape 4": ("TypeError", "mesh_shape must be a sequence of sizes", "got 4"),
            "mesh_shape floats": ("TypeError", "mesh_shape must hold integers", "2.9"),
            "names": ("TypeError", "mesh_dim_names must be a sequence of names", "'ep'"),
            "Shard": ("TypeError", "Shard expects the number of a tensor dim", "'0'"),
            "top_k": ("TypeError", "top_k must be an int, got 2.0"),
            "no experts": ("ValueError", "num_experts must be at least 1, got 0"),
            "update_expert_bias": ("TypeError", "expects a mesh", "'ep'"),
            "bool scores": ("ValueError", "scores must be floating numbers"),
        }
        assert_words(found, words)


def test_wrong_calls(pool):
    """All stop before anything is sent: the ranks stay in step."""
    for found in pool.run(cases.wrong_calls, problem=PROBLEM):
        experts = (
            "GroupedExperts: ExpertTensorParallel has the module called as (x, num_tokens_per_expert, scores=None)"
        )
        one_tensor = "the module must return one tensor of the shape of x"
        one_row = "the module must return one row for each row of x"
        words = {
            "no counts": ("TypeError", experts, "missing a required argument: 'num_tokens_per_expert'", "MoE layer"),
            "unknown": ("TypeError", experts, "unexpected keyword argument 'weights'"),
            "too many": ("TypeError", experts, "too many positional arguments", "NoneType, int"),
            "dense without x": ("TypeError", "FeedForward: TensorParallel has the module called as (x"),
            "dense width": ("ValueError", "FeedForward: x must have shape [..., 6]", ", 5)"),
            "dtype": ("ValueError", "x is ", "but the weights", "cast x"),
            "returns tuple": ("TypeError", "Odd: ", one_tensor, "got tuple; return that alone"),
            "returns None": ("TypeError", "Odd: ", one_tensor, "got NoneType"),
            "returns rows": ("ValueError", "Odd: ", one_row),
            "returns tuple in a layer": ("TypeError", one_tensor, "got tuple"),
            "returns None in a layer": ("TypeError", one_tensor, "got NoneType"),
            "returns rows in a layer": ("ValueError", one_row),
        }
        assert_words(found, words)


def test_wrong_calls_of_torch(torch_pool):
    for found in torch_pool.run(cases.of_torch_in_a_call):
        words = {
            "no counts": ("TypeError", "GroupedExperts.forward() missing 1 required positional argument"),
            "sparse": ("TypeError", "x must be a plain torch tensor, got torch.Tensor (sparse_coo)"),
            "sparse tokens": ("TypeError", "x must be a plain torch tensor, got torch.Tensor (sparse_coo)"),
            "counts on meta": ("ValueError", "num_tokens_per_expert is on meta and has no numbers"),
            "tokens on meta": ("ValueError", "rows are on meta but the experts' weights on cpu"),
        }
        assert_words(found, words)


def test_names_in_a_trace(torch_pool):
    for names in torch_pool.run(cases.trace_names, problem=PROBLEM):
        assert names == [
            "combine: all-to-all of rows over ep",
            "combine: all-to-all of rows over ep (backward)",
            "dispatch: all-to-all of counts over ep",
            "dispatch: all-to-all of rows over ep",
            "dispatch: all-to-all of rows over ep (backward)",
            "experts: sum of the output rows over tp",
            "experts: sum of the rows' gradient over tp (backward)",
        ]
