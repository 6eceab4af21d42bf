"""The styles: C1 permutation, C2 dispatch and combine, C3 TensorParallel, C4 ExpertTensorParallel.

Index arithmetic runs here; everything else runs on real ranks of every platform, against one device in float64.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.expert_parallel.exchange.rows import expert_major_order, inverse_order, splits_by_rank
from tests.distributed import expert_cases as cases
from tests.harness import oracle, parity
from tests.harness.frameworks import framework

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
COUNTS_PL = st.integers(1, 5).flatmap(
    lambda ranks: st.integers(1, 5).flatmap(
        lambda local: st.lists(
            st.lists(st.integers(0, 4), min_size=local, max_size=local), min_size=ranks, max_size=ranks
        )
    )
)


def tolerance(pool):
    return framework(pool.platform).tolerance


def problem(ep, num_experts=4, dim=6, hidden=8, **kwargs):
    return oracle.make_problem(ep, num_experts, dim, hidden, **kwargs)


class TestC1Permutation:
    def test_splits(self):
        # Experts 0, 1, 2 | 3, 4, 5 lie on ranks 0 | 1.
        assert splits_by_rank([1, 0, 2, 5, 0, 1], 2) == (3, 6)
        assert splits_by_rank([1, 0, 2, 5, 0, 1], 1) == (9,)
        assert splits_by_rank([1, 0, 2], 3) == (1, 0, 2)

    def test_order_of_two_ranks_and_two_experts(self):
        # From rank 0: two rows for expert a, one for b; from rank 1: one for a, two for b.
        # Rank-major    a0 a0 b0 a1 b1 b1
        #                0  1  2  3  4  5
        # Expert-major  a0 a0 a1 b0 b1 b1
        #                0  1  3  2  4  5
        assert expert_major_order([[2, 1], [1, 2]]).tolist() == [0, 1, 3, 2, 4, 5]

    def test_order_with_empty_pieces(self):
        # Rank-major    b0 | a1 c1 c1 | (nothing from rank 2)    positions 0 | 1 2 3
        # Expert-major  a1 b0 c1 c1
        assert expert_major_order([[0, 1, 0], [1, 0, 2], [0, 0, 0]]).tolist() == [1, 0, 2, 3]

    def test_order_of_nothing(self):
        order = expert_major_order([[0, 0], [0, 0]])
        assert order.dtype == np.int64 and order.tolist() == []

    def test_order_is_the_identity_for_one_rank_or_one_expert(self):
        assert expert_major_order([[2, 0, 3]]).tolist() == [0, 1, 2, 3, 4]
        assert expert_major_order([[2], [0], [3]]).tolist() == [0, 1, 2, 3, 4]

    def test_inverse(self):
        assert inverse_order(np.array([2, 0, 1])).tolist() == [1, 2, 0]

    @settings(deadline=None)
    @given(COUNTS_PL)
    def test_order_sorts_by_expert_then_rank_and_keeps_rows_in_sequence(self, counts):
        rows = [
            (expert, rank, i)
            for rank, of_rank in enumerate(counts)
            for expert, n in enumerate(of_rank)
            for i in range(n)
        ]
        order = expert_major_order(counts)
        assert [rows[position] for position in order] == sorted(rows)

    @settings(deadline=None)
    @given(COUNTS_PL)
    def test_inverse_undoes_the_order(self, counts):
        order = expert_major_order(counts)
        assert order[inverse_order(order)].tolist() == list(range(len(order)))
        assert inverse_order(order)[order].tolist() == list(range(len(order)))

    @settings(deadline=None)
    @given(st.integers(1, 6), st.integers(1, 6), st.data())
    def test_splits_add_up(self, ranks, local, data):
        counts = data.draw(st.lists(st.integers(0, 9), min_size=ranks * local, max_size=ranks * local))
        splits = splits_by_rank(counts, ranks)
        assert len(splits) == ranks and sum(splits) == sum(counts)


class TestC2DispatchAndCombine:
    """Expert parallelism: rows travel, weights do not."""

    @pytest.mark.parametrize("ep", [1, 2, 4])
    def test_parity(self, pool, ep):
        results = pool.run(parity.errors, style="ExpertParallel", ep=ep, tp=1, problem=problem(ep, num_experts=8))
        parity.assert_close(results, tolerance(pool))

    def test_one_local_expert(self, pool):
        results = pool.run(parity.errors, style="ExpertParallel", ep=4, tp=1, problem=problem(4))
        parity.assert_close(results, tolerance(pool))

    @pytest.mark.parametrize("kind", ["keep_rank_major", "swap_splits"])
    def test_negative_control(self, pool, kind):
        # Ranks send as many rows as they receive, in another distribution, so that swapped splits still fit.
        counts = [np.roll([3, 2, 2, 1, 0, 1, 1, 0], 2 * rank) for rank in range(4)]
        experiment = {"style": "ExpertParallel", "ep": 4, "tp": 1, "problem": problem(4, 8, counts=counts)}
        parity.assert_close(pool.run(parity.errors, **experiment), tolerance(pool))
        broken = parity.worst(pool.run(parity.errors, **experiment, breaks=(kind,)))
        assert broken["output"] > 0.1 and broken["x"] > 0.1

    @pytest.mark.parametrize(
        "ep,counts",
        [
            (2, [[16, 0, 0, 16], [16, 0, 0, 16]]),
            (4, [[16, 0, 0, 0]] * 4),
            (4, [[0, 0, 0, 0]] * 4),
            (4, [[0, 0, 0, 0], [3, 0, 0, 1], [0, 0, 0, 0], [0, 2, 0, 0]]),
        ],
        ids=["two experts", "one expert", "no rows", "ranks without rows"],
    )
    def test_zero_rows(self, pool, ep, counts):
        results = pool.run(parity.errors, style="ExpertParallel", ep=ep, tp=1, problem=problem(ep, counts=counts))
        parity.assert_close(results, tolerance(pool))

    @pytest.mark.parametrize("rows", [(18, 24, 30, 12), (3, 0, 7, 1)])
    def test_ranks_with_different_numbers_of_rows(self, pool, rows):
        experiment = problem(4, num_experts=8, rows_per_ep_rank=rows)
        parity.assert_close(
            pool.run(parity.errors, style="ExpertParallel", ep=4, tp=1, problem=experiment), tolerance(pool)
        )


class TestC3TensorParallel:
    """Experts cut along their hidden dim: no rows travel."""

    @pytest.mark.parametrize("with_scores", [True, False])
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_parity(self, pool, tp, with_scores):
        results = pool.run(
            parity.errors, style="TensorParallel", ep=1, tp=tp, problem=problem(1), with_scores=with_scores
        )
        parity.assert_close(results, tolerance(pool))

    @pytest.mark.parametrize("kind,value", [("drop_tp_sum", "output"), ("drop_gradient_sum", "x")])
    def test_negative_control(self, pool, kind, value):
        broken = pool.run(parity.errors, style="TensorParallel", ep=1, tp=2, problem=problem(1), breaks=(kind,))
        assert parity.worst(broken)[value] > 0.1

    def test_sums_in_a_wider_dtype(self, pool):
        """Megatron !2942. Each term is rounded once, and so is the sum."""
        for wide, narrow, slices in pool.run(cases.sums_in_wider_dtype, problem=problem(1, 4, 6, 16), tp=4):
            for name, *values in zip(("output", "gradient of the rows"), wide, narrow, *slices):
                in_wide, in_narrow, *terms = values
                rounded_once = np.sum(terms, axis=0, dtype=np.float64).astype(np.float32)
                assert np.array_equal(in_wide, rounded_once), name
                assert not np.array_equal(in_narrow, rounded_once), name

    def test_placements(self, pool):
        for of_rank in pool.run(cases.layout, style="TensorParallel", ep=1, tp=4, problem=problem(1)):
            assert all(of_rank[name]["placements_ours"] for name in of_rank)
            assert of_rank["w1"]["local_shape"] == of_rank["w3"]["local_shape"] == (4, 2, 6)
            assert of_rank["w2"]["local_shape"] == (4, 6, 2)
            assert all(of_rank[name]["local_right"] and of_rank[name]["gathered_right"] for name in of_rank)


class TestC4ExpertTensorParallel:
    """Both at once, on a mesh ("ep", "tp")."""

    def test_etp_01_placements(self, pool):
        for of_rank in pool.run(cases.layout, style="ExpertTensorParallel", ep=2, tp=2, problem=problem(2)):
            for name, last in (("w1", 1), ("w2", 2), ("w3", 1)):
                assert of_rank[name]["placements"] == ["Shard(dim=0)", f"Shard(dim={last})"]
                assert of_rank[name]["placements_ours"]
                assert of_rank[name]["mesh_names"] == ("ep", "tp")
                assert of_rank[name]["local_right"] and of_rank[name]["gathered_right"]
            assert of_rank["w1"]["local_shape"] == of_rank["w3"]["local_shape"] == (2, 4, 6)
            assert of_rank["w2"]["local_shape"] == (2, 6, 4)

    @pytest.mark.parametrize("with_scores", [True, False])
    def test_etp_02_no_tp_collective_in_dispatch_or_combine(self, pool, with_scores):
        results = pool.run(
            cases.collectives, style="ExpertTensorParallel", ep=2, tp=2, problem=problem(2), with_scores=with_scores
        )
        for of_rank in results:
            inside = [(verb, ranks) for verb, ranks, step in of_rank["calls"] if step]
            outside = [(verb, ranks) for verb, ranks, step in of_rank["calls"] if not step]
            assert inside and {ranks for _, ranks in inside} == {of_rank["ep"]}
            # Over tp: output rows forward; rows and scores backward. All are sums.
            on_tp = [verb for verb, ranks in outside if ranks == of_rank["tp"]]
            assert on_tp == ["all_reduce"] * (3 if with_scores else 2)
            # Every other collective is an exchange of the backward pass, over ep.
            assert {ranks for _, ranks in outside} == {of_rank["ep"], of_rank["tp"]}

    @pytest.mark.parametrize("with_scores", [True, False])
    @pytest.mark.parametrize("ep,tp", MESHES)
    def test_etp_03_one_device(self, pool, ep, tp, with_scores):
        results = pool.run(
            parity.errors,
            style="ExpertTensorParallel",
            ep=ep,
            tp=tp,
            problem=problem(ep, 8, 6, 16),
            with_scores=with_scores,
        )
        parity.assert_close(results, tolerance(pool))

    def test_etp_03_equals_ep_only_and_tp_only(self, pool):
        """The same rows through three styles: (2, 2) against ep = 2 alone, and against tp = 2 alone."""
        two = problem(2)
        etp = {
            where: ev
            for where, ev in pool.run(cases.evaluations, style="ExpertTensorParallel", ep=2, tp=2, problem=two)
        }
        ep = {where: ev for where, ev in pool.run(cases.evaluations, style="ExpertParallel", ep=2, tp=1, problem=two)}
        for (ep_rank, _), evaluation in etp.items():
            same_values(evaluation, ep[ep_rank, 0], tolerance(pool))
        for ep_rank in range(2):
            for name, axis in (("w1", 1), ("w2", 2), ("w3", 1)):
                halves = [etp[ep_rank, tp_rank].parameter_gradients[name] for tp_rank in range(2)]
                whole = ep[ep_rank, 0].parameter_gradients[name]
                assert oracle.relative_error(np.concatenate(halves, axis), whole) < tolerance(pool)

        one = problem(1)
        etp = dict(pool.run(cases.evaluations, style="ExpertTensorParallel", ep=1, tp=2, problem=one))
        tp = dict(pool.run(cases.evaluations, style="TensorParallel", ep=1, tp=2, problem=one))
        for where, evaluation in etp.items():
            same_values(evaluation, tp[where], tolerance(pool))
            for name in ("w1", "w2", "w3"):
                pair = evaluation.parameter_gradients[name], tp[where].parameter_gradients[name]
                assert oracle.relative_error(*pair) < tolerance(pool)

    @pytest.mark.parametrize(
        "kinds,values",
        [
            (("drop_tp_sum",), ("output",)),
            (("drop_gradient_sum",), ("x", "scores")),
            (("keep_rank_major",), ("output", "x", "w1")),
        ],
        ids=["tp sum forward", "tp sum backward", "order of rows"],
    )
    def test_negative_control(self, pool, kinds, values):
        even = problem(2, counts=[[4, 3, 5, 4], [2, 6, 3, 5]])
        experiment = {"style": "ExpertTensorParallel", "ep": 2, "tp": 2, "problem": even, "breaks": kinds}
        broken = parity.worst(pool.run(parity.errors, **experiment))
        assert all(broken[value] > 0.1 for value in values)

    def test_negative_control_two_experts_in_each_others_place(self, pool):
        right = problem(2)
        swapped = oracle.make_problem(2, 4, 6, 8)
        for name in ("w1", "w2", "w3"):
            getattr(swapped, name)[[0, 1]] = getattr(swapped, name)[[1, 0]]
        per_rank = pool.run(cases.evaluations, style="ExpertTensorParallel", ep=2, tp=2, problem=swapped)
        expected = oracle.one_device(right)
        assert max(oracle.relative_error(ev.output, expected.outputs[ep]) for (ep, _), ev in per_rank) > 0.1

    def test_layers_share_a_style_calls_overlap_and_copies_are_free(self, pool):
        first, other = problem(2), problem(2, seed=1)
        expected = oracle.one_device(first, with_scores=False), oracle.one_device(other, with_scores=False)
        results = pool.run(cases.interleaved_and_copied, ep=2, tp=2, problem=first, other=other)
        for rank, result in enumerate(results):
            ep_rank = rank // 2
            inputs = result["interleaved"].input_gradients
            for gradient, of in zip(inputs, expected):
                assert oracle.relative_error(gradient, of.x_gradients[ep_rank]) < tolerance(pool)
            assert "sums to" in result["error"]
            assert result["state_left"] == []
            assert result["copy_class"] and result["copy_placements"]
            parity.assert_close([result["original"]], tolerance(pool))
            # The copy has weights of its own, and computes with them.
            assert oracle.relative_error(result["copy_output"], oracle.one_device(first).outputs[ep_rank]) > 0.1

    def test_frozen_weights_stay_frozen(self, pool):
        for flags, has_gradient in pool.run(cases.not_trainable, ep=2, tp=2, problem=problem(2)):
            assert flags == {"w1": True, "w2": False, "w3": True}
            assert has_gradient == {"w1": True, "w3": True}

    def test_debug_mode_names_the_ranks_that_hold_other_rows(self, pool):
        for message in pool.run(cases.debug_digests, ep=2, tp=2, problem=problem(2)):
            assert "the same x; those of tp coordinates [1] differ" in message


def same_values(evaluation, other, limit):
    assert oracle.relative_error(evaluation.output, other.output) < limit
    for mine, others in zip(evaluation.input_gradients, other.input_gradients):
        assert oracle.relative_error(mine, others) < limit
