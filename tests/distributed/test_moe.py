"""The MoE layer over real ranks, against tests/harness/moe_oracle.py: one device in numpy."""

import numpy as np
import pytest

from tests.distributed import moe_cases as cases
from tests.distributed.moe_cases import VARIANTS
from tests.harness import moe_oracle as oracle
from tests.harness import parity
from tests.harness.frameworks import framework
from tests.harness.oracle import relative_error
from tests.harness.setting import local_part

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]


def tolerance(pool):
    return framework(pool.platform).tolerance


def compare(per_rank, problem, ep, tp, shared="replicated"):
    """Errors of every rank against one device. Gradients of replicated weights are summed over ep, as training does."""
    expected = oracle.one_device(problem)
    by_rank = {rank: evaluation for rank, evaluation, _ in per_rank}
    results = []
    for (ep_rank, tp_rank), evaluation, counts in per_rank:
        assert counts == expected.counts[ep_rank].tolist()
        output = expected.outputs[ep_rank]
        found = {
            "output": (evaluation.output.reshape(output.shape), output),
            "loss": (evaluation.loss, expected.losses[ep_rank]),
        }
        for gradient in evaluation.input_gradients:
            found["x"] = gradient.reshape(output.shape), expected.x_gradients[ep_rank]
        for name, whole in expected.weight_gradients.items():
            mine = evaluation.parameter_gradients[name]
            if name.startswith("experts."):
                found[name] = mine, local_part(whole, name[-2:], ep, tp, ep_rank, tp_rank)
                continue
            if shared == "sharded" and name.startswith("shared_experts."):
                whole = np.split(whole, tp, axis=1 if ".w2." in name else 0)[tp_rank]
            found[name] = sum(by_rank[other, tp_rank].parameter_gradients[name] for other in range(ep)), whole
        results.append({name: relative_error(*pair) for name, pair in found.items()})
    return results


def wrong(pool, problem, ep, tp, shared="replicated", **keywords):
    """Names of the values that differ from one device by more than rounding."""
    results = compare(
        pool.run(cases.evaluations, problem=problem, ep=ep, tp=tp, shared=shared, **keywords), problem, ep, tp, shared
    )
    return {name for name, error in parity.worst(results).items() if error > 1000 * tolerance(pool)}


class TestParity:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("ep,tp", MESHES)
    def test_one_device(self, pool, ep, tp, variant):
        """torchtitan 2387, 2416: the gate's gradient was one tp rank's term; sglang PR 26845: the shared expert was
        summed twice; torchtitan PR 3604: tokens [B, S, D] changed places."""
        settings, shared, shape = VARIANTS[variant]
        problem = oracle.make_problem(ep, settings)
        arguments = {"problem": problem, "ep": ep, "tp": tp, "shared": shared, "shape": shape}
        per_rank = pool.run(cases.evaluations, **arguments)
        for (ep_rank, _), evaluation, _ in per_rank:
            assert evaluation.output.shape == evaluation.input_gradients[0].shape == (shape or (12, 6))
            first = next(other for rank, other, _ in per_rank if rank == (ep_rank, 0))
            np.testing.assert_array_equal(evaluation.input_gradients[0], first.input_gradients[0])
            name = "router.gate.weight"
            np.testing.assert_array_equal(evaluation.parameter_gradients[name], first.parameter_gradients[name])
        parity.assert_close(compare(per_rank, problem, ep, tp, shared), tolerance(pool))

    @pytest.mark.parametrize("ep,tp", [(2, 2), (1, 4)])
    def test_gates_stay_equal(self, pool, ep, tp):
        """torchtitan 2387: after a step every tp rank had another gate."""
        problem = oracle.make_problem(ep, VARIANTS["before"][0])
        expected = oracle.one_device(problem).weight_gradients["router.gate.weight"]
        per_rank = pool.run(cases.one_step, problem=problem, ep=ep, tp=tp, learning_rate=0.1)
        for _, before, after, gradient in per_rank:
            assert relative_error(gradient, expected) < tolerance(pool)
            assert relative_error(after, before - 0.1 * expected) < tolerance(pool)
            np.testing.assert_array_equal(after, per_rank[0][2])

    def test_shared_expert_over_tp_beside_experts_over_ep(self, pool):
        """Experts that are not split over tp leave the shared expert to sum by itself."""
        problem = oracle.make_problem(2, VARIANTS["inside"][0])
        arguments = {"problem": problem, "ep": 2, "tp": 2, "shared": "sharded", "style": "ExpertParallel"}
        per_rank = pool.run(cases.evaluations, **arguments)
        expected = oracle.one_device(problem)
        for (ep_rank, _), evaluation, _ in per_rank:
            assert relative_error(evaluation.output, expected.outputs[ep_rank]) < tolerance(pool)
            assert relative_error(evaluation.input_gradients[0], expected.x_gradients[ep_rank]) < tolerance(pool)

    @pytest.mark.parametrize("ep,tokens", [(2, [12, 0]), (2, [0, 12]), (4, [0, 7, 0, 1]), (1, [0])])
    def test_ranks_without_tokens(self, pool, ep, tokens):
        tp = 1 if ep == 4 else 2
        settings, shared, _ = VARIANTS["inside"]
        problem = oracle.make_problem(ep, settings, tokens_per_ep_rank=tokens)
        per_rank = pool.run(cases.evaluations, problem=problem, ep=ep, tp=tp, shared=shared)
        for (ep_rank, _), evaluation, _ in per_rank:
            if tokens[ep_rank] == 0:
                assert evaluation.output.shape == evaluation.input_gradients[0].shape == (0, 6)
                assert not evaluation.parameter_gradients["router.gate.weight"].any()
        if sum(tokens):
            parity.assert_close(compare(per_rank, problem, ep, tp, shared), tolerance(pool))
        else:
            assert not any(g.any() for _, evaluation, _ in per_rank for g in evaluation.parameter_gradients.values())

    @pytest.mark.parametrize("variant", ["before", "inside"])
    def test_tokens_without_gradient(self, pool, variant):
        """A rank without tokens must still pass on the gradients of rows it received, though it asks for none."""
        problem = oracle.make_problem(2, VARIANTS[variant][0], tokens_per_ep_rank=[12, 0])
        per_rank = pool.run(cases.weights_only, problem=problem, ep=2, tp=2)
        parity.assert_close(compare(per_rank, problem, 2, 2), tolerance(pool))

    @pytest.mark.parametrize(
        "kind,seen",
        [
            ("drop_tp_sum", {"output", "loss", "x", "router.gate.weight"}),
            ("drop_sum_of_scores", {"x", "router.gate.weight"}),
            ("drop_sum_of_tokens", {"x"}),
            ("bias_in_scores", {"output", "loss", "x", "router.gate.weight", "experts.w1"}),
        ],
    )
    def test_comparison_sees(self, pool, kind, seen):
        """Negative controls, each with the values it must spoil; what the first two leave alone must stay right."""
        problem = oracle.make_problem(2, VARIANTS["before"][0])
        found = wrong(pool, problem, 2, 2, breaks=(kind,))
        assert found == seen if kind.startswith("drop_sum_of") else found >= seen


class TestCollectives:
    @pytest.mark.parametrize(
        "ep,tp,shared",
        [(ep, tp, shared) for ep, tp in ((2, 2), (1, 4)) for shared in ("none", "replicated", "sharded")]
        + [(2, 1, "replicated"), (1, 1, "replicated")],
    )
    def test_sums_over_tp(self, pool, ep, tp, shared):
        """sglang PR 26845, vllm 37856: one sum per layer, whatever is in it; backward tokens and scores."""
        settings = VARIANTS[{"none": "after", "replicated": "before", "sharded": "inside"}[shared]][0]
        problem = oracle.make_problem(ep, settings)
        for found in pool.run(cases.collectives, problem=problem, ep=ep, tp=tp, shared=shared):
            for calls, sums in ((found["forward"], 1), (found["backward"], 2)):
                assert calls.count(("all_reduce", found["tp"])) == (sums if tp > 1 else 0)
                others = {call for call in calls if call != ("all_reduce", found["tp"])}
                # On MindSpore's CPU backend an exchange is made of sends and receives.
                assert {ranks for _, ranks in others} == ({found["ep"]} if ep > 1 else set())
                if pool.platform == "torch" and ep > 1:
                    assert {verb for verb, _ in others} == {"all_to_all_single"}

    def test_counts_travel_while_rows_are_gathered(self, pool):
        problem = oracle.make_problem(2, oracle.Settings())
        for calls in pool.run(cases.order_of_calls, problem=problem, ep=2, tp=2):
            assert calls == [
                "start_counts_exchange",
                "permute",  # tokens
                "permute",  # scores
                "all_to_all_rows in",
                "permute in",
                "all_to_all_rows in",
                "permute in",
                "permute out",
                "all_to_all_rows out",
                "unpermute",
            ]

    def test_one_expert_per_rank_needs_no_order(self, pool):
        problem = oracle.make_problem(4, oracle.Settings(), num_experts=4)
        exchanges = ["all_to_all_rows in", "all_to_all_rows in", "all_to_all_rows out"]
        for calls in pool.run(cases.order_of_calls, problem=problem, ep=4, tp=1):
            assert calls == ["start_counts_exchange", "permute", "permute", *exchanges, "unpermute"]

    def test_one_ep_rank_exchanges_nothing(self, pool):
        problem = oracle.make_problem(1, oracle.Settings())
        for calls in pool.run(cases.order_of_calls, problem=problem, ep=1, tp=4):
            assert calls == ["permute", "permute", "unpermute"]

    def test_sums_in_a_wider_dtype(self, pool):
        """Each tp rank's term is rounded once, and so is the sum of the layer's output."""
        problem = oracle.make_problem(1, VARIANTS["after"][0])
        for in_wide, in_narrow, terms in pool.run(cases.sums_in_wider_dtype, problem=problem, tp=4):
            rounded_once = np.sum(terms, axis=0, dtype=np.float64).astype(np.float32)
            assert np.array_equal(in_wide, rounded_once) and not np.array_equal(in_narrow, rounded_once)


class TestLoad:
    @pytest.mark.parametrize("how", [None, "recomputed", "reentrant"])
    def test_counter(self, pool, how):
        """torchtitan PR 1593, 4148: recomputation counted twice, evaluation was counted."""
        if pool.platform == "mindspore" and how == "reentrant":
            pytest.skip("one way to recompute")
        problem = oracle.make_problem(2, VARIANTS["after"][0])
        expected = oracle.one_device(problem)
        per_rank = pool.run(cases.counted_load, problem=problem, ep=2, tp=2, how=how)
        for ep_rank, counts, clone, gradients, plain in per_rank:
            once = expected.counts[ep_rank]
            assert once.sum() == 12 * 3
            assert counts == [(n * once).tolist() for n in (0, 1, 1, 3)]
            assert clone == once.tolist()
            for name, gradient in gradients.items():
                assert relative_error(gradient, plain[name]) < tolerance(pool)

    @pytest.mark.parametrize("ep,tp", [(2, 2), (4, 1), (1, 2)])
    def test_bias_update(self, pool, ep, tp):
        problem = oracle.make_problem(ep, VARIANTS["inside"][0], tokens_per_ep_rank=[12, 5, 9, 3][:ep])
        load = oracle.one_device(problem).counts
        expected = problem.bias + 0.125 * np.sign(load.sum() / 8 - load.sum(0))
        per_rank = pool.run(cases.updated_bias, problem=problem, ep=ep, tp=tp, rate=0.125)
        for ep_rank, counted, before, after, left, kept in per_rank:
            assert counted == load[ep_rank].tolist() and left == [0] * 8
            assert kept[0].endswith("int64") and kept[1].endswith("float32")
            assert relative_error(before, problem.bias) < 1e-7 and relative_error(after, expected) < 1e-6
            np.testing.assert_array_equal(after, per_rank[0][3])

    @pytest.mark.parametrize("names", [None, ("dp", "ep")])
    def test_bias_update_over_other_axes(self, pool, names):
        problem = oracle.make_problem(1, VARIANTS["inside"][0])
        for rank, bias in enumerate(pool.run(cases.updated_bias_over, problem=problem, names=names)):
            ranks = [rank] if names is None else range(4)
            load = np.sum([[r, 0, 4, 1 + r, 2, 2, 2, 2] for r in ranks], axis=0)
            assert relative_error(bias, problem.bias + 0.5 * np.sign(load.mean() - load)) < 1e-6

    def test_load_becomes_even(self, pool):
        settings = oracle.Settings(score_func="sigmoid")
        problem = oracle.make_problem(2, settings, tokens_per_ep_rank=32)
        per_rank = dict(pool.run(cases.balanced_load, problem=problem, ep=2, tp=2, rate=0.05, steps=9))
        load = per_rank[0] + per_rank[1]
        skew = load.max(1) / load.mean(1)
        assert skew[0] > 3 and skew[-3:].mean() < 1.7  # 1 would be even


def test_errors(pool):
    problem = oracle.make_problem(1, oracle.Settings())
    for found in pool.run(cases.errors, problem=problem):
        assert found.pop("bias without rate")
        words = {
            "top_k_zero": "top_k (0) must lie between 1 and num_experts (8)",
            "top_k_large": "top_k (9) must lie between 1 and num_experts (8)",
            "score_func": 'must be "softmax" or "sigmoid", got \'tanh\'',
            "half_of_groups": "must be given together",
            "other_half_of_groups": "must be given together",
            "uneven_groups": "num_experts (8) must fill num_expert_groups (3)",
            "groups_of_one": "num_experts (8) must fill num_expert_groups (8) of at least 2",
            "too_many_groups": "num_limited_groups (5) must lie between 1 and 4",
            "no_groups": "num_limited_groups (0) must lie between 1 and 4",
            "groups_too_small": "top_k (5) does not fit into 2 groups",
            "score_position": "got 'between'",
            "update without bias": "bias_update_rate",
        }
        kind, message = found.pop("moe unknown")
        assert kind == "TypeError" and "route_nrom" in message
        for name, (kind, message) in found.items():
            assert kind == "ValueError" and words[name.removeprefix("router ").removeprefix("moe ")] in message


@pytest.mark.parametrize("style", ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"])
def test_debug_mode_names_the_ranks_that_hold_other_tokens(pool, style):
    for equal, different in pool.run(
        cases.debug_mode, problem=oracle.make_problem(2, VARIANTS["before"][0]), style=style
    ):
        assert equal is None
        assert "must be given the same tokens; those of tp coordinates [1] differ" in different
