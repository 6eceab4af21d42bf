"""Cases about parallelised experts, run on every rank; each returns plain values that a test looks at."""

import copy
from dataclasses import replace

import numpy as np

import hyper_parallel as hp
from tests.harness import parity
from tests.harness.recording import recorded
from tests.harness.setting import HIDDEN_DIM, coordinates, local_part, make_experts, mesh_for, whole_mesh


def parallel_experts(context, style, ep, tp, problem):
    style = getattr(hp, style)()
    return style.apply(make_experts(context, problem), mesh_for(context, style, ep, tp))


def layout(context, style, ep, tp, problem):
    """Placements, local shapes, local and gathered values of the three weights."""
    experts = parallel_experts(context, style, ep, tp, problem)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    result = {}
    for name in ("w1", "w2", "w3"):
        weight, whole = getattr(experts, name), getattr(problem, name)
        local = context.framework.array(weight.to_local())
        gathered = context.framework.array(weight.full_tensor())
        result[name] = {
            "placements": [repr(p) for p in weight.placements],
            "placements_ours": tuple(weight.placements)
            == (hp.Shard(0), hp.Shard(2 if name == "w2" else 1))[-len(tuple(weight.placements)) :],
            "mesh_names": tuple(weight.device_mesh.mesh_dim_names),
            "local_shape": local.shape,
            "local_right": bool((local == local_part(whole, name, ep, tp, ep_rank, tp_rank)).all()),
            "gathered_right": bool((gathered == whole).all()),
        }
    return result


def collectives(context, style, ep, tp, problem, with_scores=True):
    """Collectives of one forward and backward, and the ranks of this rank's ep and tp groups."""
    experts = parallel_experts(context, style, ep, tp, problem)
    mesh = whole_mesh(context.platform, context.world_size, ep, tp, context.framework.device_type)
    whole = np.arange(context.world_size).reshape(-1, ep, tp)
    dp_rank, ep_rank, tp_rank = mesh.get_coordinate()
    with recorded(context) as calls:
        parity.evaluate(context, experts, problem, ep_rank, with_scores)
    return {
        "calls": [(call.verb, call.ranks, call.step) for call in calls],
        "ep": tuple(whole[dp_rank, :, tp_rank].tolist()),
        "tp": tuple(whole[dp_rank, ep_rank].tolist()),
    }


def sums_in_wider_dtype(context, problem, tp):
    """Outputs and gradients of the rows in float32: with the sum over tp formed in float64, in float32, and of each tp
    rank's slice alone."""
    adapter = context.framework
    counts, weights = adapter.int_tensor(problem.counts[0]), adapter.tensor(problem.targets[0], "float32")

    def evaluate(experts):
        def function(x):
            y = experts(x, counts)
            return adapter.total(y * weights), y

        evaluation = adapter.value_and_gradients(function, [adapter.tensor(problem.x[0], "float32")], experts)
        return evaluation.output, evaluation.input_gradients[0]

    def parallel(**keywords):
        style = hp.TensorParallel(**keywords)
        return style.apply(make_experts(context, problem, "float32"), mesh_for(context, style, 1, tp))

    def slice_alone(tp_rank):
        cut = {name: local_part(getattr(problem, name), name, 1, tp, 0, tp_rank) for name in HIDDEN_DIM}
        return make_experts(context, replace(problem, **cut), "float32")

    wide = evaluate(parallel(reduce_dtype=adapter.dtype_object("float64")))
    return wide, evaluate(parallel()), [evaluate(slice_alone(tp_rank)) for tp_rank in range(tp)]


def evaluations(context, style, ep, tp, problem):
    """Output and gradients of this rank as arrays, with its coordinates."""
    experts = parallel_experts(context, style, ep, tp, problem)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    return (ep_rank, tp_rank), parity.evaluate(context, experts, problem, ep_rank)


def sgd_losses(context, ep, tp, problem, steps, learning_rate):
    """Losses over all ep ranks of SGD steps on the experts alone."""
    experts = parallel_experts(context, "ExpertTensorParallel", ep, tp, problem)
    ep_rank, _ = coordinates(context, ep, tp)
    num_rows = problem.counts.sum()
    losses = []
    for _ in range(steps):
        evaluation = parity.evaluate(context, experts, problem, ep_rank)
        losses.append(evaluation.loss / num_rows)
        for name, parameter in context.framework.parameters(experts).items():
            gradient = evaluation.parameter_gradients[name] / num_rows
            context.framework.fill(parameter, context.framework.array(parameter) - learning_rate * gradient)
    return losses, ep_rank


def interleaved_and_copied(context, ep, tp, problem, other):
    """Two layers under one style whose calls overlap, a deep copy, and a call after one that failed."""
    adapter = context.framework
    style = hp.ExpertTensorParallel()
    mesh = mesh_for(context, style, ep, tp)
    first, second = make_experts(context, problem), make_experts(context, other)
    style.apply(first, mesh)
    style.apply(second, mesh)
    ep_rank, _ = coordinates(context, ep, tp)
    result = {}

    def function(x, y):
        # The second layer runs between the first layer's forward and its backward, and the first runs once more.
        a = first(x, adapter.int_tensor(problem.counts[ep_rank]))
        b = second(y, adapter.int_tensor(other.counts[ep_rank]))
        again = first(x, adapter.int_tensor(problem.counts[ep_rank]))
        target = adapter.tensor(problem.targets[ep_rank])
        loss = (
            adapter.loss(a, target) + adapter.loss(b, adapter.tensor(other.targets[ep_rank])) + 0 * adapter.total(again)
        )
        return loss, a

    inputs = [adapter.tensor(problem.x[ep_rank]), adapter.tensor(other.x[ep_rank])]
    result["interleaved"] = adapter.value_and_gradients(function, inputs)

    before = set(vars(first))
    try:
        first(adapter.tensor(problem.x[ep_rank]), adapter.int_tensor(problem.counts[ep_rank] + 1))
        result["error"] = None
    except ValueError as error:
        result["error"] = str(error)
    adapter.clear_after_error()
    result["state_left"] = sorted(set(vars(first)) - before)

    clone = copy.deepcopy(first)
    for parameter in adapter.parameters(clone).values():
        adapter.fill(parameter, 2 * adapter.array(parameter))
    result["copy_class"] = type(clone) is type(first)
    result["copy_placements"] = tuple(clone.w1.placements) == tuple(first.w1.placements)
    result["original"] = parity.compare(context, parity.evaluate(context, first, problem, ep_rank), problem, ep, tp)
    result["copy_output"] = parity.evaluate(context, clone, problem, ep_rank).output
    return result


def different_seeds(context, ep, tp):
    """Weights drawn differently on every rank: what they are before, and gathered after apply."""
    hp.set_platform(context.platform)
    experts = hp.GroupedExperts(4, 8, 4)
    adapter = context.framework
    for name, parameter in adapter.parameters(experts).items():
        random = np.random.default_rng(100 * context.rank + len(name))
        adapter.set_parameter(experts, name, random.standard_normal(tuple(parameter.shape)))
    before = {name: adapter.array(parameter) for name, parameter in adapter.parameters(experts).items()}
    style = hp.ExpertTensorParallel()
    style.apply(experts, mesh_for(context, style, ep, tp))
    return before, {name: adapter.array(getattr(experts, name).full_tensor()) for name in before}


def odd_inputs(context, ep, tp, problem):
    """Gradients of a plain sum (stride 0), and inputs that are transposed or cut out of something larger."""
    adapter = context.framework
    experts = parallel_experts(context, "ExpertTensorParallel", ep, tp, problem)
    ep_rank, _ = coordinates(context, ep, tp)
    counts = adapter.int_tensor(problem.counts[ep_rank])
    x = problem.x[ep_rank]
    wide = np.concatenate([np.full_like(x, 9.0), x, np.full_like(x, 9.0)], axis=1)
    dim = x.shape[1]

    def of_sum(make_x):
        def function(value):
            output = experts(make_x(value), counts)
            return adapter.total(output), output

        return function

    def run(array, make_x):
        return adapter.value_and_gradients(of_sum(make_x), [adapter.tensor(array)], experts)

    return ep_rank, {
        "plain": run(x, lambda value: value),
        "transposed": run(np.ascontiguousarray(x.T), lambda value: value.T),
        "columns": run(wide, lambda value: value[:, dim : 2 * dim]),
    }


def not_trainable(context, ep, tp, problem):
    """requires_grad, names and dtypes before and after apply, with one weight frozen."""
    experts = make_experts(context, problem)
    experts.w2.requires_grad = False
    style = hp.ExpertTensorParallel()
    style.apply(experts, mesh_for(context, style, ep, tp))
    named = experts.parameters_and_names() if context.platform == "mindspore" else experts.named_parameters()
    flags = {name: parameter.requires_grad for name, parameter in named}
    evaluation = parity.evaluate(context, experts, problem, coordinates(context, ep, tp)[0])
    return flags, {name: gradient is not None for name, gradient in evaluation.parameter_gradients.items()}


def debug_digests(context, ep, tp, problem):
    """In debug mode: good rows pass, rows that differ on tp coordinate 1 raise on every rank of the tp group."""
    import os

    adapter = context.framework
    experts = parallel_experts(context, "ExpertTensorParallel", ep, tp, problem)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    counts = adapter.int_tensor(problem.counts[ep_rank])
    os.environ["HYPER_PARALLEL_DEBUG"] = "1"
    try:
        experts(adapter.tensor(problem.x[ep_rank]), counts)
        x = problem.x[ep_rank] + (0.5 if tp_rank == 1 else 0.0)
        try:
            experts(adapter.tensor(x), counts)
        except ValueError as error:
            return str(error)
        return None
    finally:
        del os.environ["HYPER_PARALLEL_DEBUG"]
