"""The oracle against arithmetic that knows nothing of it: single rows, and central differences."""

import numpy as np
import pytest

from tests.harness import oracle

PROBLEMS = {
    "uneven": oracle.make_problem(ep=2, num_experts=4, dim=3, hidden=5, rows_per_ep_rank=[7, 4], seed=1),
    "empty_experts": oracle.make_problem(ep=2, num_experts=4, dim=3, hidden=5, counts=[[5, 0, 0, 1], [0, 0, 0, 2]]),
    "empty_rank": oracle.make_problem(ep=2, num_experts=2, dim=3, hidden=5, counts=[[0, 0], [0, 6]]),
}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def total_loss(problem, with_scores):
    return sum(oracle.one_device(problem, with_scores).losses)


def central_difference(problem, with_scores, values):
    """The gradient of the total loss for `values`, an array inside `problem`, which is put back as it was."""
    step, gradient = 1e-5, np.zeros(values.shape)
    for index in np.ndindex(values.shape):
        before = values[index]
        losses = []
        for moved in (before + step, before - step):
            values[index] = moved
            losses.append(total_loss(problem, with_scores))
        values[index] = before
        gradient[index] = (losses[0] - losses[1]) / (2 * step)
    return gradient


def test_forward_of_single_rows():
    problem = PROBLEMS["uneven"]
    outputs = oracle.one_device(problem).outputs
    for rank, counts in enumerate(problem.counts):
        row = 0
        for expert, count in enumerate(counts):
            for _ in range(count):
                x = problem.x[rank][row]
                gate = [sum(w * v for w, v in zip(weights, x)) for weights in problem.w1[expert]]
                up = [sum(w * v for w, v in zip(weights, x)) for weights in problem.w3[expert]]
                hidden = [g * (1 / (1 + np.exp(-g))) * u for g, u in zip(gate, up)]
                y = [sum(w * h for w, h in zip(weights, hidden)) for weights in problem.w2[expert]]
                np.testing.assert_allclose(outputs[rank][row], problem.scores[rank][row] * np.array(y), rtol=1e-12)
                row += 1


@pytest.mark.parametrize("with_scores", [True, False])
def test_gradients_against_central_differences(problem, with_scores):
    result = oracle.one_device(problem, with_scores)
    pairs = [
        (problem.w1, result.w1_gradient),
        (problem.w2, result.w2_gradient),
        (problem.w3, result.w3_gradient),
        *zip(problem.x, result.x_gradients),
    ]
    if with_scores:
        pairs += zip(problem.scores, result.score_gradients)
    for values, gradient in pairs:
        assert oracle.relative_error(gradient, central_difference(problem, with_scores, values)) < 1e-8


def test_experts_without_rows_have_zero_gradients():
    result = oracle.one_device(PROBLEMS["empty_experts"])
    for gradient in (result.w1_gradient, result.w2_gradient, result.w3_gradient):
        assert [bool(np.any(expert)) for expert in gradient] == [True, False, False, True]


def test_problem_is_uneven_distinct_and_of_order_one():
    problem = oracle.make_problem(ep=4, num_experts=8, dim=16, hidden=32, rows_per_ep_rank=64)
    assert problem.counts.sum(axis=1).tolist() == [64] * 4
    assert (problem.counts == 0).any() and problem.counts.max() > 16
    rows = np.concatenate(problem.x)
    assert len(np.unique(rows, axis=0)) == len(rows)
    result = oracle.one_device(problem)
    for value in (*result.outputs, *result.x_gradients):
        assert 0.1 < np.sqrt(np.mean(value**2)) < 10
    for value in (problem.w1, problem.w2, problem.w3, *problem.x, *problem.scores, *problem.targets):
        np.testing.assert_array_equal(value.astype(np.float32), value)


def test_counts_must_fit():
    problem = PROBLEMS["uneven"]
    with pytest.raises(ValueError, match="counts sum to 3, but there are 7 rows"):
        oracle.grouped_experts(problem.x[0], [1, 1, 1, 0], problem.w1, problem.w2, problem.w3)
    with pytest.raises(ValueError, match="expected"):
        oracle.make_problem(ep=2, num_experts=2, dim=3, hidden=5, counts=[[1, 2]])


def test_relative_error_sees_what_a_tolerance_may_not():
    expected = 1e-9 * np.ones((2, 3))
    assert oracle.relative_error(expected, expected) == 0
    assert oracle.relative_error(np.zeros((2, 3)), expected) == pytest.approx(1)
    assert oracle.relative_error(-expected, expected) == pytest.approx(2)
    assert oracle.relative_error(expected, np.zeros((2, 3))) > 1e200
    assert oracle.relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    with pytest.raises(ValueError, match="shape"):
        oracle.relative_error(expected.T, expected)
    with pytest.raises(ValueError, match="finite"):
        oracle.relative_error(np.full((2, 3), np.nan), expected)
