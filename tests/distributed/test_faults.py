"""Faults that MoE libraries have really had, one test each; the reports are named where they are public."""

import numpy as np
import pytest

from tests.distributed import error_cases, expert_cases
from tests.distributed import fault_cases as cases
from tests.harness import oracle, parity
from tests.harness.frameworks import framework
from tests.harness.pool import RankPool


def tolerance(pool):
    return framework(pool.platform).tolerance


def problem(ep, num_experts=4, dim=6, hidden=8, **kwargs):
    return oracle.make_problem(ep, num_experts, dim, hidden, **kwargs)


class TestGradients:
    @pytest.mark.parametrize("ep,tp", [(2, 2), (1, 2)])
    def test_input_gradient_is_whole_and_the_same_on_all_tp_ranks(self, pool, ep, tp):
        """torchtitan PR 1878: the rows' gradient was one tp rank's term."""
        experiment = problem(ep)
        expected = oracle.one_device(experiment)
        per_rank = pool.run(expert_cases.evaluations, style="ExpertTensorParallel", ep=ep, tp=tp, problem=experiment)
        first = {ep_rank: ev for (ep_rank, tp_rank), ev in per_rank if tp_rank == 0}
        for (ep_rank, _), evaluation in per_rank:
            for got, want, same in zip(
                evaluation.input_gradients,
                (expected.x_gradients[ep_rank], expected.score_gradients[ep_rank]),
                first[ep_rank].input_gradients,
            ):
                assert oracle.relative_error(got, want) < tolerance(pool)
                np.testing.assert_array_equal(got, same)

    @pytest.mark.parametrize("tp", [2, 4])
    def test_norms_of_weight_gradients(self, pool, tp):
        """torchtitan PR 4054: gradients were tp times too large, which an optimizer like Adam hides."""
        expected = oracle.one_device(problem(1))
        per_rank = pool.run(expert_cases.evaluations, style="ExpertTensorParallel", ep=1, tp=tp, problem=problem(1))
        per_rank = dict(per_rank)
        for name in ("w1", "w2", "w3"):
            norm = np.sqrt(sum(np.sum(per_rank[0, t].parameter_gradients[name] ** 2) for t in range(tp)))
            assert abs(np.linalg.norm(getattr(expected, f"{name}_gradient")) / norm - 1) < 1e-4

    @pytest.mark.parametrize("ep", [1, 2, 4])
    def test_mean_loss_over_all_tokens(self, pool, ep):
        """pytorch 160285, torchtitan PR 1551: which divisor. The sum over all ranks' rows, divided by their number, is
        the gradient of the mean, for every ep degree alike: the ranks' shares need no further reduction."""
        whole = problem(1, num_experts=8, rows_per_ep_rank=48)
        expected, split = oracle.one_device(whole), split_over(whole, ep)
        per_rank = dict(pool.run(expert_cases.evaluations, style="ExpertTensorParallel", ep=ep, tp=1, problem=split))
        for name in ("w1", "w2", "w3"):
            gathered = np.concatenate([per_rank[rank, 0].parameter_gradients[name] / 48 for rank in range(ep)])
            want = getattr(expected, f"{name}_gradient") / 48
            assert oracle.relative_error(gathered, want) < tolerance(pool)

    def test_twenty_steps_on_every_mesh(self, pool):
        """Megatron 1628: losses drifted apart between parallel layouts."""
        curves = {}
        for ep, tp in ((1, 1), (1, 4), (4, 1), (2, 2)):
            experiment = split_over(problem(1, num_experts=8, rows_per_ep_rank=48), ep)
            per_rank = pool.run(expert_cases.sgd_losses, ep=ep, tp=tp, problem=experiment, steps=20, learning_rate=0.5)
            by_ep = {ep_rank: losses for losses, ep_rank in per_rank}
            curves[ep, tp] = np.sum(list(by_ep.values()), axis=0)
        assert curves[1, 1][-1] < 0.8 * curves[1, 1][0]  # it learns
        for curve in curves.values():
            assert np.max(np.abs(curve / curves[1, 1] - 1)) < 1e-5

    def test_biased_experts_are_refused(self, pool):
        """torchtitan PR 4245: w2's bias was added once per tp rank. Biases are refused, by name."""
        for results in pool.run(error_cases.wrong_modules):
            (kind, message), unchanged, _ = results["bias"]
            assert kind == "ValueError" and "w2_bias" in message and unchanged


class TestZeroRows:
    def test_all_rows_to_one_expert(self, pool):
        """NeMo-Automodel PR 2995: an expert without rows must have a zero gradient, not none."""
        experiment = problem(2, counts=[[16, 0, 0, 0]] * 2)
        for found in pool.run(cases.backward_collectives, ep=2, tp=2, problem=experiment):
            for name, (shape, _) in found["gradients"].items():
                assert shape == found["local_shapes"][name]

    def test_experts_in_the_middle_get_none(self, pool):
        """torchtitan 1118, pytorch 152668: counts [16, 0, 0, 16] hung or failed."""
        experiment = problem(2, counts=[[16, 0, 0, 16]] * 2)
        results = pool.run(parity.errors, style="ExpertTensorParallel", ep=2, tp=2, problem=experiment)
        parity.assert_close(results, tolerance(pool))

    def test_ranks_without_rows(self, pool):
        """Megatron 1877 and PR 4851: shapes (0, D) flow through and back, with the same collectives on every rank."""
        experiment = problem(4, counts=[[16, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4])
        results = pool.run(cases.backward_collectives, ep=4, tp=1, problem=experiment)
        assert [found["rows"] for found in results] == [16, 0, 0, 0]
        assert {found["backward"] for found in results} == {3}  # rows in, rows out, scores
        for found in results[1:]:
            assert found["shapes"] == ((0, 6), (0, 6))
            assert all(gradient == (found["local_shapes"][name], 0.0) for name, gradient in found["gradients"].items())
        parity.assert_close(
            pool.run(parity.errors, style="ExpertTensorParallel", ep=4, tp=1, problem=experiment), tolerance(pool)
        )

    def test_tp_ranks_without_rows(self, pool):
        """The same with a sum over tp on either side."""
        experiment = problem(2, counts=[[9, 7, 0, 0], [0, 0, 0, 0]])
        results = pool.run(cases.backward_collectives, ep=2, tp=2, problem=experiment)
        assert len({found["backward"] for found in results}) == 1
        parity.assert_close(
            pool.run(parity.errors, style="ExpertTensorParallel", ep=2, tp=2, problem=experiment), tolerance(pool)
        )

    @pytest.mark.parametrize("rows", [(18, 24, 30, 12), (3, 0, 7, 1)])
    def test_uneven_ranks(self, pool, rows):
        """NeMo-Automodel PR 1365."""
        results = pool.run(
            parity.errors, style="ExpertTensorParallel", ep=4, tp=1, problem=problem(4, rows_per_ep_rank=rows)
        )
        parity.assert_close(results, tolerance(pool))


class TestInputs:
    def test_gradients_with_stride_zero_and_inputs_that_are_not_contiguous(self, pool):
        """pytorch PR 141816."""
        experiment = problem(2)
        results = pool.run(expert_cases.odd_inputs, ep=2, tp=2, problem=experiment)
        expected = [
            oracle.grouped_experts_gradients(np.ones_like(x), x, counts, experiment.w1, experiment.w2, experiment.w3)
            for x, counts in zip(experiment.x, experiment.counts)
        ]
        for ep_rank, found in results:
            want, dim = expected[ep_rank].x, experiment.x[ep_rank].shape[1]
            columns = found["columns"].input_gradients[0]
            assert oracle.relative_error(found["plain"].input_gradients[0], want) < tolerance(pool)
            assert oracle.relative_error(found["transposed"].input_gradients[0], want.T) < tolerance(pool)
            assert oracle.relative_error(columns[:, dim : 2 * dim], want) < tolerance(pool)
            assert not columns[:, :dim].any() and not columns[:, 2 * dim :].any()
            for name in ("w1", "w2", "w3"):
                same = [evaluation.parameter_gradients[name] for evaluation in found.values()]
                assert all(oracle.relative_error(gradient, same[0]) < tolerance(pool) for gradient in same)

    def test_counts_are_waited_for(self, pool):
        """HCCL gives the host no order of its own: dispatch must wait before it reads."""
        experiment = problem(2)
        parity.assert_close(pool.run(cases.late_counts, ep=2, tp=2, problem=experiment), tolerance(pool))

    def test_counts_that_never_come_are_seen(self, pool):
        """The negative control of the test above."""
        with pytest.raises(AssertionError):
            results = pool.run(cases.late_counts, ep=2, tp=2, problem=problem(2), honest=False)
            parity.assert_close(results, tolerance(pool))

    def test_rank_0s_weights_are_laid_out(self, pool):
        """pytorch 88838: every rank drew other weights."""
        results = pool.run(expert_cases.different_seeds, ep=2, tp=2)
        first, _ = results[0]
        assert any((before["w1"] != first["w1"]).any() for before, _ in results[1:])
        for _, gathered in results:
            for name, weight in first.items():
                np.testing.assert_array_equal(gathered[name], weight)

    @pytest.mark.parametrize("ep,tp", [(1, 1), (2, 2), (4, 1), (1, 4)])
    def test_local_sizes(self, pool, ep, tp):
        """transformers 48308: parameters that a plan named stayed whole."""
        for local, total, names_kept in pool.run(cases.local_sizes, ep=ep, tp=tp):
            assert local * ep * tp == total and names_kept


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["die", "stay away", "die after forward"])
def test_a_missing_rank_is_an_error_that_names_the_operation(platform, how):
    """Within the time limit set for collectives (5 s here), not a hang. The other ep group, whole, may finish first."""
    with RankPool(platform, 4, collective_limit_s=5) as small:
        arguments = {"problem": problem(2)}
        if how == "die after forward":
            results = small.run(cases.late_backward, collect=True, time_limit_s=60, **arguments)
        else:
            results = small.run(cases.stay_away, collect=True, time_limit_s=60, how=how.split()[0], **arguments)
    messages = [answer for answer in results[:3] if isinstance(answer, tuple) and answer[0] is not None]
    assert messages, results
    for message, seconds in messages:
        assert "failed on rank" in message and "the group is [" in message, message
        assert any(word in message for word in ("dispatch", "combine", "experts:")), message
        assert seconds < 30
    # Rank 1 shares its ep group with rank 3.
    assert isinstance(results[1], tuple) and "[1, 3]" in results[1][0], results[1]


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["mesh", "apply"])
def test_a_rank_that_died_before_the_first_call(platform, what):
    """torch waits 30 minutes for it, whatever limit the user set (5 s here): nobody may, and all say what for."""
    if platform == "mindspore" and what == "apply":
        pytest.skip("MindSpore meets nobody while it makes a mesh, so that both are one case")
    with RankPool(platform, 4, collective_limit_s=5) as small:
        results = small.run(cases.missing_before, what=what, collect=True, time_limit_s=60)
    meets = platform == "torch" and what == "mesh"
    words = "init_device_mesh(2, 2): making the process groups failed on" if meets else "apply: agreement on the module"
    for answer in results[:3]:
        assert isinstance(answer, tuple), results
        message, seconds = answer
        assert message is not None and words in message and "the group is [" in message, message
        assert seconds < 30


def split_over(whole, ep):
    """The rows of a problem for one rank, dealt out to ep ranks."""
    num_rows, num_experts = len(whole.x[0]), whole.counts.shape[1]
    experts = np.repeat(np.arange(num_experts), whole.counts[0])
    parts = [np.arange(num_rows)[rank::ep] for rank in range(ep)]
    return oracle.Problem(
        whole.w1,
        whole.w2,
        whole.w3,
        *([values[0][part] for part in parts] for values in (whole.x, whole.scores, whole.targets)),
        counts=np.array([np.bincount(experts[part], minlength=num_experts) for part in parts]),
    )
