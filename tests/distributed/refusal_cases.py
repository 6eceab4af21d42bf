"""What was once silently wrong, or ended another process: each now an error with words, or right."""

import copy
import logging
import os
from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.distributed.error_cases import nested_model, new_parameter
from tests.distributed.variant_cases import make_layer, tokens_for
from tests.harness.setting import make_experts, mesh_for, to_dtype


def message_of(function):
    """``(kind, message)`` of what ``function()`` raises, or None."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def sharded(context, problem, style=None):
    style = style or hp.ExpertTensorParallel()
    return style.apply(make_experts(context, problem), mesh_for(context, style, 2, 2))


def at_apply(context, problem):
    """Refusals of ``apply`` and of a plan, each with a module that must be untouched."""
    mesh = mesh_for(context, hp.ExpertTensorParallel(), 2, 2)
    adapter, found = context.framework, {}

    def refused(name, module, function):
        before = type(module), dict(vars(module)), list(get_platform(module).parameters(module).values())
        found[name] = message_of(function)
        after = list(get_platform(module).parameters(module).values())
        assert type(module) is before[0] and all(a is b for a, b in zip(before[2], after, strict=True)), name

    experts = make_experts(context, problem)
    for name, dtype in (("int32", adapter.dtype_object("int32")), ("text", "float32")):
        style = hp.ExpertTensorParallel(reduce_dtype=dtype)
        refused(f"reduce_dtype {name}", experts, lambda style=style: style.apply(experts, mesh))

    model = nested_model(context)
    model.layers[1].experts.w1 = model.layers[0].experts.w1
    plan = {"layers.*.experts": hp.ExpertTensorParallel()}
    refused("shared by two layers", model, lambda: hp.parallelize_module(model, mesh, plan))
    found["class in a plan"] = message_of(lambda: hp.parallelize_module(model, mesh, {"*": hp.ExpertTensorParallel}))
    found["star"] = message_of(lambda: hp.parallelize_module(model, mesh, {"*": hp.ExpertTensorParallel()}))

    class Final(hp.GroupedExperts):
        def __init_subclass__(cls, **keywords):
            raise TypeError("Final takes no subclasses")

    final = Final(6, 8, 4)
    refused("no subclasses", final, lambda: hp.ExpertTensorParallel().apply(final, mesh))
    return found


def of_torch_at_apply(context, problem):
    """The same for what only torch has."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    style, found = hp.ExpertTensorParallel(), {}
    mesh = mesh_for(context, style, 2, 2)
    for name, shape in (("per expert", (4,)), ("per hidden", (2, 8))):
        experts = make_experts(context, problem)
        experts.register_buffer("gain", torch.ones(shape))
        found[f"buffer {name}"] = message_of(lambda experts=experts: style.apply(experts, mesh))
    experts = make_experts(context, problem)
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("ep", "tp"), _init_backend=False)
    found["descending mesh"] = message_of(lambda: style.apply(experts, backwards))
    experts.w2.data = experts.w2.data.float()
    found["dtypes"] = message_of(lambda: style.apply(experts, mesh))

    with torch.device("meta"):
        empty = hp.GroupedExperts(6, 8, 4).double()
    style.apply(empty, mesh)
    ep_rank = mesh.get_local_rank("ep")
    rows = torch.tensor(problem.x[ep_rank]), torch.tensor(problem.counts[ep_rank])
    found["meta"] = message_of(lambda: empty(*rows))
    layer = make_layer(context, 2)
    style.apply(layer.experts, mesh)
    wrapped = torch.distributed.tensor.DTensor.from_local(torch.ones(4, 6).double(), mesh["tp"])
    found["DTensor"] = message_of(lambda: layer(wrapped))
    found["width"] = message_of(lambda: layer(torch.ones(4, 7).double()))
    return found


def second_derivatives(context, problem):
    """What a gradient penalty raises over every mesh, bare and in a layer."""
    import torch

    found = []
    for ep, tp in ((2, 2), (4, 1), (1, 4)):
        style = hp.ExpertTensorParallel()
        layer = make_layer(context, 2)
        style.apply(layer.experts, mesh_for(context, style, ep, tp))
        x = torch.tensor(tokens_for(0, 4)).double().requires_grad_()

        def penalty(layer=layer, x=x):
            (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()

        found.append(message_of(penalty))
    return found


def ranks_that_differ(context, problem, how, style):
    """What every rank raises when rank 3 calls with something else; and that the next call is right."""
    adapter = context.framework
    experts, odd = sharded(context, problem), context.rank == 3
    mesh = mesh_for(context, hp.ExpertTensorParallel(), 2, 2)
    ep_rank = mesh.get_local_rank("ep")
    dtype = "float32" if how == "dtype" and odd else None
    x = adapter.tensor(problem.x[ep_rank], *([dtype] if dtype else []))
    counts, scores = adapter.int_tensor(problem.counts[ep_rank]), adapter.tensor(problem.scores[ep_rank])
    if how == "gradient":
        x.requires_grad_(not odd)
    arguments = (x, counts) if how == "scores" and odd else (x, counts, scores)
    # The dtype of the weights is not what is tried here.
    same_dtype = mock.patch.object(type(get_platform(experts)), "same_dtype", lambda *_: True)
    with same_dtype:
        found = message_of(lambda: experts(*arguments)) if mesh.get_local_rank("tp") == 1 else None
    y = experts(adapter.tensor(problem.x[ep_rank]), counts, scores)
    return found, adapter.array(y)


def ranks_that_differ_at_apply(context, problem):
    """What every rank raises where rank 3 applies something else; and the experts' output when it no longer does."""
    hp.set_platform(context.platform)
    style, odd = hp.ExpertTensorParallel(), context.rank == 3
    mesh = mesh_for(context, style, 2, 2)
    sizes = {"num_experts": (6, 8, 2), "hidden_dim": (6, 4, 4), "dim": (8, 8, 4), "style": (6, 8, 4)}
    found = {}
    for name, other in sizes.items():
        experts = hp.GroupedExperts(*(other if odd else (6, 8, 4)))
        other_style = hp.DedupExpertTensorParallel() if name == "style" and odd else style
        before = dict(get_platform(experts).parameters(experts))
        found[name] = message_of(lambda apply=other_style.apply, experts=experts: apply(experts, mesh))
        after = get_platform(experts).parameters(experts)
        assert all(after[key] is value for key, value in before.items()), name
    experts = to_dtype(context, hp.GroupedExperts(6, 8, 4), "float16" if odd else "float32")
    found["dtype"] = message_of(lambda: style.apply(experts, mesh))
    experts = hp.GroupedExperts(6, 8, 4)
    if odd:
        experts.w4 = new_parameter(context, (4, 2))
    found["parameters"] = (
        message_of(lambda: hp.ExpertParallel().apply(experts, mesh["ep"])) if context.rank % 2 else None
    )

    ep_rank, adapter = mesh.get_local_rank("ep"), context.framework
    x, counts = adapter.tensor(problem.x[ep_rank]), adapter.int_tensor(problem.counts[ep_rank])
    return found, adapter.array(sharded(context, problem)(x, counts))


def debug_mode(context, problem, how):
    """In debug mode: what is raised, and what is logged."""
    adapter = context.framework
    experts = sharded(context, problem)
    mesh = mesh_for(context, hp.ExpertTensorParallel(), 2, 2)
    x = np.array(problem.x[mesh.get_local_rank("ep")])
    if how == "nan":
        x[2, 1] = np.nan
    if how == "columns" and mesh.get_local_rank("tp") == 1:
        x = np.ascontiguousarray(x[:, ::-1])
    counts = adapter.int_tensor(problem.counts[mesh.get_local_rank("ep")])
    records = []
    handler = mock.Mock(level=logging.WARNING, handle=lambda record: records.append(record.getMessage()))
    logger = logging.getLogger("hyper_parallel")
    logger.addHandler(handler)
    try:
        with mock.patch.dict(os.environ, HYPER_PARALLEL_DEBUG="1"):
            return message_of(lambda: experts(adapter.tensor(x), counts)), records
    finally:
        logger.removeHandler(handler)


def wrong_arguments(context):
    """Constructors and calls with arguments of a wrong kind."""
    hp.set_platform(context.platform)
    layer = make_layer(context, 2, bias_update_rate=0.1)
    attempts = {
        "mesh_shape 4": lambda: hp.init_device_mesh("cpu", 4),
        "mesh_shape floats": lambda: hp.init_device_mesh("cpu", (2.9, 2.1)),
        "names": lambda: hp.init_device_mesh("cpu", (4,), mesh_dim_names="ep"),
        "Shard": lambda: hp.Shard("0"),
        "top_k": lambda: hp.MoE(6, 8, 8, 2.0),
        "no experts": lambda: hp.GroupedExperts(6, 8, 0),
        "update_expert_bias": lambda: layer.update_expert_bias("ep"),
        "bool scores": lambda: layer.experts(
            context.framework.tensor(np.ones((8, 6))),
            context.framework.int_tensor([1] * 8),
            context.framework.int_tensor([1] * 8) > 0,
        ),
    }
    return {name: message_of(attempt) for name, attempt in attempts.items()}


def odd_experts(context, change):
    """Experts whose forward returns ``change(rows)``."""
    forward = "construct" if context.platform == "mindspore" else "forward"

    def changed(self, x, num_tokens_per_expert, scores=None):
        return change(getattr(hp.GroupedExperts, forward)(self, x, num_tokens_per_expert, scores))

    return type("Odd", (hp.GroupedExperts,), {forward: changed})(6, 8, 4)


def wrong_calls(context, problem):
    """Calls of sharded modules with other arguments, and modules that return something else."""
    adapter, style = context.framework, hp.ExpertTensorParallel()
    experts, mesh = sharded(context, problem), mesh_for(context, hp.ExpertTensorParallel(), 2, 2)
    ep_rank = mesh.get_local_rank("ep")
    x, counts = adapter.tensor(problem.x[ep_rank]), adapter.int_tensor(problem.counts[ep_rank])
    dense = hp.TensorParallel().apply(to_dtype(context, hp.FeedForward(6, 8), adapter.dtype), mesh["tp"])
    layer = make_layer(context, 2)
    attempts = {
        "no counts": lambda: experts(x),
        "unknown": lambda: experts(x, counts, weights=x),
        "too many": lambda: experts(x, counts, None, 3),
        "dense without x": lambda: dense(),
        "dense width": lambda: dense(x[:, :5]),
        "dtype": lambda: layer(adapter.int_tensor(np.ones((4, 6)))),
    }
    returned = {"tuple": lambda y: (y, None), "None": lambda y: None, "rows": lambda y: y[:-1]}
    for name, change in returned.items():
        bare = style.apply(to_dtype(context, odd_experts(context, change), adapter.dtype), mesh)
        attempts[f"returns {name}"] = lambda bare=bare: bare(x, counts)
        layer = hp.MoE(6, 8, 4, 2)
        layer.experts = odd_experts(context, change)
        to_dtype(context, layer, adapter.dtype)
        attempts[f"returns {name} in a layer"] = lambda layer=layer: layer(x)
    return {name: message_of(attempt) for name, attempt in attempts.items()}


def of_torch_in_a_call(context):
    """The same for what only torch has: tensors that are sparse, or on meta."""
    import torch

    hp.set_platform("torch")
    experts, layer, rows = hp.GroupedExperts(6, 8, 4), hp.MoE(6, 8, 4, 2), torch.ones(8, 6)
    counts = torch.tensor([2, 2, 2, 2])
    attempts = {
        "no counts": lambda: experts(rows),
        "sparse": lambda: experts(rows.to_sparse(), counts),
        "sparse tokens": lambda: layer(rows.to_sparse()),
        "counts on meta": lambda: experts(rows, counts.to("meta")),
        "tokens on meta": lambda: layer(rows.to("meta")),
    }
    return {name: message_of(attempt) for name, attempt in attempts.items()}


def trace_names(context, problem):
    """Names of the library's operations in a profiler's trace of one step."""
    import torch

    experts = sharded(context, problem)
    ep_rank = mesh_for(context, hp.ExpertTensorParallel(), 2, 2).get_local_rank("ep")
    x, counts = torch.tensor(problem.x[ep_rank]).requires_grad_(), torch.tensor(problem.counts[ep_rank])
    copy.deepcopy(experts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        experts(x, counts).sum().backward()
    return sorted({event.key for event in profile.key_averages() if " over " in event.key})
