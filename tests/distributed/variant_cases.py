"""A MoE layer under one style against another, or against one device, on the same weights and tokens."""

import copy

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.exchange import SplitExchange
from tests.harness import oracle
from tests.harness.recording import recorded
from tests.harness.setting import coordinates, mesh_for, to_dtype

DIM, HIDDEN, NUM_EXPERTS = 6, 8, 8
# What torch's wrapper for recomputation puts into parameters' names.
WRAPPER = "_checkpoint_wrapped_module."


def make_layer(context, top_k, **arguments):
    """A MoE layer with the same weights on every rank and platform."""
    hp.set_platform(context.platform)
    layer = to_dtype(context, hp.MoE(DIM, HIDDEN, NUM_EXPERTS, top_k, **arguments), context.framework.dtype)
    for name, parameter in sorted(context.framework.parameters(layer).items()):
        if parameter.requires_grad:
            rng = np.random.default_rng(sum(map(ord, name)))
            values = rng.standard_normal(tuple(parameter.shape)) / np.sqrt(parameter.shape[-1])
            context.framework.set_parameter(layer, name, values.astype(np.float32))
    return layer


def tokens_for(rank, num_tokens):
    return np.random.default_rng(50 + rank).standard_normal((num_tokens, DIM)).astype(np.float32)


def evaluate(context, layer, x):
    adapter = context.framework

    def function(x):
        y = layer(x)
        return adapter.total(y * y), y

    return adapter.value_and_gradients(function, [adapter.tensor(x)], layer)


def against_one_device(context, style, ep, tp, top_k, num_tokens=(16,), shared=False, around=None, **arguments):
    """Relative errors of output and all gradients; experts' gradients as this rank's part of one device's.

    ``around(context, layer)`` prepares the sharded layer in place.
    """
    style = getattr(hp, style)()
    one = make_layer(context, top_k, num_shared_experts=int(shared), **arguments)
    layer = copy.deepcopy(one)
    mesh = mesh_for(context, style, ep, tp)
    style.apply(layer.experts, mesh)
    if shared:
        hp.TensorParallel().apply(layer.shared_experts, mesh["tp"])
    if around is not None:
        around(context, layer)
    ep_rank, _ = coordinates(context, ep, tp)
    batches = [tokens_for(rank, num_tokens[rank % len(num_tokens)]) for rank in range(ep)]
    found = evaluate(context, layer, batches[ep_rank])
    whole = evaluate(context, one, np.concatenate(batches))
    start = sum(map(len, batches[:ep_rank]))
    mine = slice(start, start + len(batches[ep_rank]))
    errors = {
        "output": (found.output, whole.output[mine]),
        "x": (found.input_gradients[0], whole.input_gradients[0][mine]),
    }
    gradients = {name.replace(WRAPPER, ""): value for name, value in found.parameter_gradients.items()}
    for name, expected in whole.parameter_gradients.items():
        gradient = gradients[name]
        if name.startswith("experts."):
            errors[name] = gradient, part(expected, name, ep, tp, *coordinates(context, ep, tp))
        elif name.startswith("shared_experts."):
            axis = 1 if ".w2." in name else 0
            summed = sum_over_ep(context, gradient, mesh)
            errors[name] = summed, np.split(expected, tp, axis)[coordinates(context, ep, tp)[1]]
        else:
            errors[name] = sum_over_ep(context, gradient, mesh), expected
    return {name: oracle.relative_error(*pair) for name, pair in errors.items()}


def part(whole, name, ep, tp, ep_rank, tp_rank):
    axis = 2 if name.endswith("w2") else 1
    return np.split(np.split(whole, ep, 0)[ep_rank], tp, axis)[tp_rank]


def sum_over_ep(context, array, mesh):
    from hyper_parallel.platform import get_platform

    value = context.framework.tensor(array)
    return context.framework.array(get_platform(value).sum_over_group(value, mesh.get_group("ep"), "sum for a test"))


def rows_over_ep(context, style, ep, tp, top_k, num_tokens):
    """Rows of tokens that this rank sends over ep in one forward, its own included, and collectives per group."""
    style = getattr(hp, style)()
    layer = make_layer(context, top_k)
    mesh = mesh_for(context, style, ep, tp)
    style.apply(layer.experts, mesh)
    from hyper_parallel.platform import get_platform

    platform = type(get_platform(layer))
    sent = []
    original = platform.all_to_all_rows

    def counting(self, x, send_splits, recv_splits, group, name):
        if group == mesh.get_group("ep") and len(x.shape) == 2 and x.shape[1] == DIM:
            sent.append((name, sum(send_splits)))
        return original(self, x, send_splits, recv_splits, group, name)

    platform.all_to_all_rows = counting
    try:
        with recorded(context) as calls:
            layer(context.framework.tensor(tokens_for(coordinates(context, ep, tp)[0], num_tokens)))
    finally:
        platform.all_to_all_rows = original
    return sent, [call.verb for call in calls]


def bare_experts(context, style, ep, tp, problem):
    """The style on experts outside a MoE layer."""
    from tests.harness import parity

    return parity.errors(context, style, ep, tp, problem)


def with_a_second_sum(context, ep, tp):
    """SplitExpertTensorParallel as if the layer had to sum over tp for it."""
    from unittest import mock

    with mock.patch.object(SplitExchange, "sums_over_tp", False):
        return against_one_device(context, "SplitExpertTensorParallel", ep, tp, 2)
