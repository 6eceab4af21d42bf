"""The oracle of the MoE layer against arithmetic that knows nothing of it: single tokens, and central differences."""

import math

import numpy as np
import pytest

from tests.harness import moe_oracle as oracle
from tests.harness.oracle import relative_error

SETTINGS = {
    "softmax_inside": oracle.Settings(),
    "softmax_before": oracle.Settings(
        score_position="before", route_norm=True, num_expert_groups=3, num_limited_groups=2, num_shared_experts=1
    ),
    "sigmoid_after": oracle.Settings(
        top_k=3, score_func="sigmoid", score_position="after", route_norm=True, route_scale=2.5, num_shared_experts=2
    ),
    "sigmoid_before": oracle.Settings(score_func="sigmoid", score_position="before", route_scale=0.5),
}


@pytest.fixture(params=SETTINGS)
def problem(request):
    return oracle.make_problem(2, SETTINGS[request.param], 6, 3, 5, tokens_per_ep_rank=[5, 3], seed=2)


def choices(problem):
    gate = problem.weights["router.gate.weight"]
    return [oracle.route(x, gate, problem.settings, problem.bias).selected_TK for x in problem.x]


def test_gradients_against_central_differences(problem):
    """The choice is held fixed: it has no gradient, and a step must not cross to another one."""
    selected, step = choices(problem), 1e-5
    result = oracle.one_device(problem)
    pairs = [(problem.weights[name], gradient) for name, gradient in result.weight_gradients.items()]
    assert len(pairs) == len(problem.weights)
    for values, gradient in [*pairs, *zip(problem.x, result.x_gradients)]:
        expected = np.zeros(values.shape)
        for index in np.ndindex(values.shape):
            before, losses = values[index], []
            for moved in (before + step, before - step):
                values[index] = moved
                losses.append(sum(oracle.one_device(problem, selected).losses))
            values[index] = before
            expected[index] = (losses[0] - losses[1]) / (2 * step)
        assert relative_error(gradient, expected) < 1e-8


def test_forward_of_single_tokens(problem):
    weights, settings = problem.weights, problem.settings
    for x, output, selected in zip(problem.x, oracle.one_device(problem).outputs, choices(problem)):
        for token, y, experts in zip(x, output, selected):
            logits = [sum(g * v for g, v in zip(gate, token)) for gate in weights["router.gate.weight"]]
            if settings.score_func == "softmax":
                p = [math.exp(logit) / sum(math.exp(other) for other in logits) for logit in logits]
            else:
                p = [1 / (1 + math.exp(-logit)) for logit in logits]
            divisor = sum(p[expert] for expert in experts) if settings.route_norm else 1.0
            expected = np.zeros(len(token))
            for expert in experts:
                score = settings.route_scale * p[expert] / divisor
                of_expert = [weights[f"experts.{name}"][expert] for name in ("w1", "w2", "w3")]
                if settings.score_position == "before":
                    expected += swiglu(score * token, *of_expert)
                else:
                    expected += score * swiglu(token, *of_expert)
            if settings.num_shared_experts:
                expected += swiglu(token, *(weights[f"shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")))
            np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def swiglu(x, w1, w2, w3):
    gate = w1 @ x
    return w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ x))


def test_choice():
    """By hand: bias included, groups worth their two best, largest first, and how close it was."""
    settings = oracle.Settings(top_k=2, num_expert_groups=3, num_limited_groups=1)
    values = np.array([[0.9, 0.0, 0.5, 0.45, 0.3, 0.4], [0.1, 0.2, 0.3, 0.1, 0.8, 0.0]])
    selected, margins = oracle.choose(values, settings)
    assert selected.tolist() == [[2, 3], [4, 5]]  # 0.95 > 0.9 > 0.7; and 0.8 > 0.4 > 0.3
    np.testing.assert_allclose(margins, [0.05, 0.4])
    selected, margins = oracle.choose(values, oracle.Settings(top_k=3))
    assert selected.tolist() == [[0, 2, 3], [4, 2, 1]]
    np.testing.assert_allclose(margins, [0.05, 0.1])


def test_bias_moves_the_choice_and_not_the_scores():
    settings = oracle.Settings(top_k=1, score_func="sigmoid")
    gate, x = np.eye(2), np.array([[1.0, 0.0]])
    plain, biased = oracle.route(x, gate, settings), oracle.route(x, gate, settings, np.array([0.0, 1.0]))
    assert plain.selected_TK.tolist() == [[0]] and biased.selected_TK.tolist() == [[1]]
    assert biased.scores_TK.tolist() == [[0.5]]


def test_problem_is_uneven_distinct_and_of_order_one():
    problem = oracle.make_problem(4, SETTINGS["sigmoid_after"], tokens_per_ep_rank=[64, 32, 0, 64])
    result = oracle.one_device(problem)
    assert result.counts.sum(1).tolist() == [192, 96, 0, 192]
    load = result.counts.sum(0)
    assert load.max() > 1.5 * load.mean() and load.min() < 0.5 * load.mean()
    tokens = np.concatenate(problem.x)
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    for value in (*result.outputs[:2], *result.x_gradients[:2]):
        assert 0.1 < np.sqrt(np.mean(value**2)) < 20
    for value in (problem.bias, *problem.weights.values(), *problem.x, *problem.targets):
        np.testing.assert_array_equal(value.astype(np.float32), value)


def test_bfloat16_problem():
    problem = oracle.make_problem(1, oracle.Settings(), margin=0.02, mantissa_bits=7)
    for value in (*problem.weights.values(), *problem.x):
        bits = value.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
