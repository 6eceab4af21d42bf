"""Cases for faults that MoE libraries have really had; see test_faults.py."""

from contextlib import contextmanager
from unittest import mock

import numpy as np

import hyper_parallel as hp
from tests.distributed.expert_cases import parallel_experts
from tests.harness import parity
from tests.harness.recording import recorded
from tests.harness.setting import coordinates


def backward_collectives(context, ep, tp, problem):
    """How many collectives the backward pass issues, and whether output and gradients exist."""
    experts = parallel_experts(context, "ExpertTensorParallel", ep, tp, problem)
    ep_rank, _ = coordinates(context, ep, tp)
    with counted(context) as calls:
        evaluation = parity.evaluate(context, experts, problem, ep_rank)
        total = len(calls)
        forward = evaluate_forward_only(context, experts, problem, ep_rank, calls)
    weights = evaluation.parameter_gradients
    return {
        "rows": len(evaluation.output),
        "backward": total - forward,
        "shapes": (evaluation.output.shape, evaluation.input_gradients[0].shape),
        "gradients": {name: None if g is None else (g.shape, float(np.abs(g).max())) for name, g in weights.items()},
        "local_shapes": {name: tuple(p.shape) for name, p in context.framework.parameters(experts).items()},
    }


def evaluate_forward_only(context, experts, problem, ep_rank, calls):
    before = len(calls)
    adapter = context.framework
    x, counts, scores = problem.x[ep_rank], problem.counts[ep_rank], problem.scores[ep_rank]
    experts(adapter.tensor(x), adapter.int_tensor(counts), adapter.tensor(scores))
    return len(calls) - before


@contextmanager
def counted(context):
    """Collectives as the platform issues them. On MindSpore an exchange is one, whatever messages it is made of."""
    if context.platform == "torch":
        with recorded(context) as calls:
            yield calls
        return
    from hyper_parallel.platform.mindspore import cpu_collectives as backend

    calls = []

    def counting(function):
        def call(*args):
            calls.append(function.__name__)
            return function(*args)

        return call

    with mock.patch.multiple(backend, all_to_all=counting(backend.all_to_all), all_reduce=counting(backend.all_reduce)):
        yield calls


def late_counts(context, ep, tp, problem, honest=True):
    """Parity on a backend that fills a result only when it is waited for (never, if not ``honest``)."""
    with late_backend(context, honest):
        return parity.errors(context, "ExpertTensorParallel", ep, tp, problem)


def late_backend(context, honest):
    if context.platform == "torch":
        from hyper_parallel.platform.torch import compat

        return mock.patch.multiple(compat, **_late_torch(compat.all_to_all_single, compat.wait_tensor, honest))
    from hyper_parallel.platform.mindspore import cpu_collectives

    late = _late_mindspore(cpu_collectives.dist_comm_irecv_op, honest)
    return mock.patch.object(cpu_collectives, "dist_comm_irecv_op", late)


class _Late:
    def __init__(self, fill):
        self.wait = fill


def _late_torch(start, wait, honest):
    pending = {}

    def started(x, *arguments):
        arrived = start(x, *arguments)
        if x.is_floating_point():
            return arrived
        empty = arrived.new_zeros(arrived.shape)
        pending[id(empty)] = arrived
        return empty

    def waited(x):
        if id(x) not in pending:
            return wait(x)
        arrived = wait(pending.pop(id(x)))
        return x.copy_(arrived) if honest else x

    return {"all_to_all_single": started, "wait_tensor": waited}


def _late_mindspore(irecv, honest):
    from mindspore import mint

    def call(target, tag, source, group):
        arrived = mint.empty(target.shape, dtype=target.dtype)
        handle = irecv(arrived, tag, source, group)[1]
        target.copy_(mint.zeros(target.shape, dtype=target.dtype))

        def fill():
            handle.wait()
            if honest:
                target.copy_(arrived)

        return target, _Late(fill)

    return call


def stay_away(context, problem, how):
    """Rank 3 dies, or does not enter the forward pass; the others call the experts."""
    import os
    import time

    experts = parallel_experts(context, "ExpertTensorParallel", 2, 2, problem)
    if context.rank == 3:
        if how == "die":
            os._exit(7)
        time.sleep(12)
        return "stayed away"
    began = time.monotonic()
    ep_rank, _ = coordinates(context, 2, 2)
    try:
        parity.evaluate(context, experts, problem, ep_rank)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def missing_before(context, what):
    """Rank 3 dies before the mesh is made, or before ``apply``; what the others raise, and after how many seconds."""
    import os
    import time

    hp.set_platform(context.platform)
    if context.rank == 3 and what == "mesh":
        os._exit(7)
    began = time.monotonic()
    try:
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        if context.rank == 3:
            os._exit(7)
        began = time.monotonic()
        hp.ExpertTensorParallel().apply(hp.GroupedExperts(6, 8, 4), mesh)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def late_backward(context, problem):
    """Rank 3 leaves after its forward pass; the others find out in their backward pass."""
    import os
    import time

    adapter = context.framework
    experts = parallel_experts(context, "ExpertTensorParallel", 2, 2, problem)
    ep_rank, _ = coordinates(context, 2, 2)
    counts, target = adapter.int_tensor(problem.counts[ep_rank]), adapter.tensor(problem.targets[ep_rank])

    def function(x):
        output = experts(x, counts)
        if context.rank == 3:
            os._exit(7)
        return adapter.loss(output, target), output

    began = time.monotonic()
    try:
        adapter.value_and_gradients(function, [adapter.tensor(problem.x[ep_rank])], experts)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def local_sizes(context, ep, tp):
    """Parameter elements on this rank, of the whole, and the names, after parallelize_module on a nested model."""
    from tests.distributed.error_cases import nested_model
    from tests.harness.setting import mesh_for

    hp.set_platform(context.platform)
    model = nested_model(context)
    total = sum(int(np.prod(p.shape)) for p in context.framework.parameters(model).values())
    names = list(context.framework.parameters(model))
    style = hp.ExpertTensorParallel()
    hp.parallelize_module(model, mesh_for(context, style, ep, tp), {"layers.*.experts": style})
    parameters = context.framework.parameters(model)
    local = sum(int(np.prod(p.shape)) for p in parameters.values())
    own_names = [p.name for p in model.get_parameters()] if context.platform == "mindspore" else names
    return local, total, list(parameters) == names and own_names == names
