"""Gradients of a whole model, by placements: sums, norms, agreement, and replicas that start alike."""

import pytest

from tests.harness.by_name import CasesOf
from tests.harness.frameworks import framework

CASES = {
    "torch": CasesOf("tests.distributed.training_torch_cases"),
    "mindspore": CasesOf("tests.distributed.training_mindspore_cases"),
}
torch_cases = CASES["torch"]


def assert_small(per_rank, tolerance):
    worst = {name: max(errors[name] for errors in per_rank) for name in per_rank[0]}
    assert all(error < tolerance for error in worst.values()), worst


def assert_step(pool, results):
    wrong = [errors.pop("has placements") for errors, _ in results]
    # The shared expert is cut over tp, and still its gradient must be summed over ep.
    assert min(wrong) > 1e-2
    assert_small([errors for errors, _ in results], framework(pool.platform).tolerance)
    assert len({norm for _, norm in results}) == 1


@pytest.mark.parametrize("ep,tp,op", [(2, 1, "sum"), (1, 2, "sum"), (2, 2, "mean")])
def test_a_step_equals_one_device(pool, ep, tp, op):
    """All ranks that are left are dp."""
    assert_step(pool, pool.run(CASES[pool.platform].step, ep=ep, tp=tp, op=op))


@pytest.mark.parametrize("ep,tp", [(2, 1), (1, 2)])
def test_fsdp(torch_pool, ep, tp):
    results = torch_pool.run(torch_cases.with_fsdp, ep=ep, tp=tp)
    assert_small([errors for errors, _ in results], 1e-12)


def test_terms_of_a_sum_and_missing_gradients(torch_pool):
    for summed, sometimes, never, frozen in torch_pool.run(torch_cases.partial):
        assert summed == [6.0] * 3  # (1 + 2) over tp, twice over ep
        assert sometimes == [1.0, 1.0] and never is None and frozen is None


def test_refusals(torch_pool):
    for said in torch_pool.run(torch_cases.refusals):
        assert said["other parameters"].startswith(
            "ValueError: reduce_gradients: the ranks [0, 1, 2, 3] gave different"
        )
        assert "axis 'all' of the mesh joins ranks" in said["flattened"]
        assert "sparse=False" in said["sparse"] and said["sparse"].startswith("ValueError")
        assert said["grads"].startswith("TypeError: on torch a gradient is the parameter's .grad")
        assert said["op"].startswith('ValueError: op must be "sum" or "mean"')
        assert said["not a mesh"].startswith("TypeError: expected a device mesh of torch")
        assert said["used up"].startswith("ValueError: no parameters were given")
        assert said["norm_type"].startswith("ValueError: norm_type must be greater than 0")
        assert said["nonfinite"].startswith("RuntimeError: the norm of order 2.0 of the gradients is nan")


def test_all_finite(pool):
    results = pool.run(CASES[pool.platform].finite)
    assert [answers for answers, _ in results] == [[True, False, False]] * 4
    assert all(isnan for _, isnan in results)


def test_few_collectives(torch_pool):
    for summed, normed, cut in torch_pool.run(torch_cases.collectives):
        assert summed == 2  # a comparison of the parameters, and one sum for all
        assert normed == 1  # over tp
        assert cut == [("dp", [0]), ("dp", [1, 2]), ("dp", [3]), ("dp", [4])]


def test_replicas_start_alike(pool):
    for said, differ in pool.run(CASES[pool.platform].synchronized):
        assert said.startswith("ValueError: replicas hold different values of ") and "(11 of 13 parameters)" in said
        assert not differ  # the norm starts with ones and zeros everywhere


def test_a_step_of_mindspores_model(mindspore_pool):
    results = mindspore_pool.run(CASES["mindspore"].trained_by_model)
    for error, losses, left_out, scale, unchanged in results:
        assert error < 1e-5
        assert len(losses) == 6 and losses[0] < 100  # the loss itself, not scaled
        assert left_out and scale == 512 and unchanged  # on all ranks, for one of them


def test_what_mindspore_steps_refuse(mindspore_pool):
    for said in mindspore_pool.run(CASES["mindspore"].refused_steps):
        assert "moe.experts.w1; make it of network.trainable_params() after the styles" in said["early optimizer"]
        assert said["op"].startswith('ValueError: op must be "sum" or "mean"')
        assert "is a shard of shape (2, 8, 8), got values of shape (4, 16, 8)" in said["whole weight"]
        assert "is a shard: MindSpore's DistributedDataParallel would" in said["DDP"]
        modes = [name for name in said if "GRAPH_MODE" in name or "jit" in name]
        assert len(modes) == 7
        for name in modes:
            assert "hyper_parallel runs in MindSpore's PyNative mode" in said[name], (name, said[name])


def test_a_whole_checkpoint_is_refused_by_shards(mindspore_pool):
    """Before anything of it is loaded."""
    for found in mindspore_pool.run(CASES["mindspore"].whole_checkpoint):
        for name, (said, changed) in found.items():
            assert "moe.experts.w1 is a shard of shape (2, 8, 8), got values of shape (4, 16, 8)" in said, (name, said)
            assert changed == 0, name


def test_recompute_before_the_style(mindspore_pool):
    for errors in mindspore_pool.run(CASES["mindspore"].recomputed_before, time_limit_s=120):
        assert all(error < 1e-5 and counted == 24 for error, counted in errors.values()), errors


def test_mindspores_own_reducer(mindspore_pool):
    assert max(mindspore_pool.run(CASES["mindspore"].by_mindspores_reducer)) < 1e-5


def test_mindspores_mixed_precision(mindspore_pool):
    for errors in mindspore_pool.run(CASES["mindspore"].in_mixed_precision, time_limit_s=120):
        for level, (sharded, one_device) in errors.items():
            assert 1e-5 < sharded < 2 * one_device + 1e-4 < 1e-2, (level, sharded, one_device)


def test_no_rank_draws_a_whole_weight(mindspore_pool):
    for sent, shape, spread, repeated in mindspore_pool.run(CASES["mindspore"].without_whole_weights):
        assert not sent and shape == (2, 16, 8)
        assert 0.9 < spread < 1.1 and not repeated


@pytest.mark.parametrize("variant", ["accumulated", "recompute", "frozen router"])
def test_load_metrics(pool, variant):
    for found, again, counts in pool.run(CASES[pool.platform].load, variant=variant):
        mean = sum(counts) / len(counts)
        deviation = (sum((count - mean) ** 2 for count in counts) / len(counts)) ** 0.5
        assert mean == 2 * 4 * 12 * 2 / 4 and deviation > 0
        assert found == {
            "moe/moe/load_max": max(counts),
            "moe/moe/load_mean": mean,
            "moe/moe/load_min": min(counts),
            "moe/moe/load_cv": pytest.approx(deviation / mean),
            "moe/moe/dead_experts": 0,
        }
        assert again["moe/moe/dead_experts"] == 4 and again["moe/moe/load_cv"] == 0
