"""The case behind most tests: one call of parallelised experts, compared with one device."""

import hyper_parallel as hp
from tests.harness import oracle
from tests.harness.setting import coordinates, local_part, make_experts, mesh_for, sabotage


def errors(context, style, ep, tp, problem, with_scores=True, breaks=()):
    """Relative errors of one rank against one device: output, loss, and the gradient of every input and weight."""
    style = getattr(hp, style)()
    experts = make_experts(context, problem)
    style.apply(experts, mesh_for(context, style, ep, tp))
    with sabotage(context, *breaks):
        evaluation = evaluate(context, experts, problem, coordinates(context, ep, tp)[0], with_scores)
    return compare(context, evaluation, problem, ep, tp, with_scores)


def evaluate(context, experts, problem, ep_rank, with_scores=True):
    """Loss, output and gradients of the experts on the rows of one ep rank."""
    adapter = context.framework
    counts = adapter.int_tensor(problem.counts[ep_rank])
    target = adapter.tensor(problem.targets[ep_rank])

    def function(x, *scores):
        output = experts(x, counts, *scores)
        return adapter.loss(output, target), output

    inputs = [problem.x[ep_rank], problem.scores[ep_rank]][: 1 + with_scores]
    return adapter.value_and_gradients(function, [adapter.tensor(value) for value in inputs], experts)


def compare(context, evaluation, problem, ep, tp, with_scores=True):
    """``evaluation`` of this rank against one device over the rows of all ep ranks."""
    ep_rank, tp_rank = coordinates(context, ep, tp)
    expected = oracle.one_device(problem, with_scores)
    found = {
        "output": (evaluation.output, expected.outputs[ep_rank]),
        "loss": (evaluation.loss, expected.losses[ep_rank]),
        "x": (evaluation.input_gradients[0], expected.x_gradients[ep_rank]),
    }
    if with_scores:
        found["scores"] = (evaluation.input_gradients[1], expected.score_gradients[ep_rank])
    for name in ("w1", "w2", "w3"):
        whole = getattr(expected, f"{name}_gradient")
        found[name] = evaluation.parameter_gradients[name], local_part(whole, name, ep, tp, ep_rank, tp_rank)
    return {name: oracle.relative_error(*pair) for name, pair in found.items()}


def worst(per_rank):
    """The largest error of each value over the ranks."""
    return {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}


def assert_close(per_rank, tolerance):
    """Every value of every rank agrees with one device."""
    bad = {name: error for name, error in worst(per_rank).items() if not error < tolerance}
    assert not bad, f"relative errors above {tolerance}: {bad}"
