"""The code for MindSpore on Ascend devices, run on CPU ranks with stand-ins for what only those devices have.

The stand-ins have the signatures and the documented meaning of the operators, and refuse what their documents exclude.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.mint import distributed as dist

import hyper_parallel as hp
from hyper_parallel import check
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore import (
    ascend_collectives,
    ascend_experts,
    ascend_routing,
    cpu_collectives,
    device,
    session,
)
from hyper_parallel.platform.mindspore import (
    routing as portable_routing,
)
from tests.harness import oracle, parity
from tests.harness.setting import make_experts, mesh_for, whole_mesh


@contextmanager
def ascend():
    """Choose the implementations for Ascend, over stand-ins; yields how often each of these was called."""
    calls = {}

    def counted(name, function):
        calls[name] = 0

        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, function in (
            (ascend_experts, _grouped_matmul_v4),
            (ops, _swiglu),
            (ops, _moe_token_unpermute),
            (dist, _all_to_all_single),
            (mint, _sort),
            (mint, _topk),
        ):
            name = function.__name__.lstrip("_")
            stack.enter_context(mock.patch.object(owner, name, counted(name, function)))
        stack.enter_context(mock.patch.object(device, "on_ascend", lambda: True))
        # As if it had not been asked before.
        stack.enter_context(mock.patch.object(device, "_rooms", device._rooms.__wrapped__))
        yield calls


def _grouped_matmul_v4(x, weight, *, group_list, split_item, group_type, group_list_type):
    (x,), (weight,) = x, weight
    counts = group_list.asnumpy()
    assert (split_item, group_type, group_list_type) == (3, 0, 1), "the only setting that has a gradient; counts"
    assert group_list.dtype == ms.int64 and len(counts) > 1 and counts.min() > 0 and counts.sum() == x.shape[0]
    assert weight.shape[:2] == (len(counts), x.shape[1]) and x.is_contiguous() and weight.is_contiguous()
    ends = np.cumsum(counts).tolist()
    pieces = [mint.matmul(x[end - n : end], weight[e]) for e, (end, n) in enumerate(zip(ends, counts.tolist()))]
    return [mint.cat(pieces, 0)]


def _swiglu(x, dim=-1):
    assert dim == -1 and 0 not in x.shape
    gate, up = mint.chunk(x, 2, -1)
    return gate * mint.sigmoid(gate) * up


def _moe_token_unpermute(permuted, sorted_indices, probs=None):
    assert sorted_indices.dtype == ms.int32 and permuted.shape[0] == probs.size > 0
    rows = permuted.asnumpy()[sorted_indices.asnumpy()].reshape(*probs.shape, permuted.shape[1])
    return Tensor((rows * probs.asnumpy()[:, :, None]).sum(1), permuted.dtype)


def _sort(x, *, dim=-1, descending=False, stable=False):
    assert dim == -1 and stable and not descending and x.dtype in (ms.int32, ms.int64)  # "well supported"
    order = np.argsort(x.asnumpy(), kind="stable")
    return Tensor(x.asnumpy()[order]), Tensor(order.astype(np.int64))


def _topk(x, k, dim=-1, largest=True, sorted=True):
    order = np.argsort(-x.asnumpy(), axis=-1, kind="stable")[:, :k]
    return Tensor(np.take_along_axis(x.asnumpy(), order, -1)), Tensor(order.astype(np.int64))


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Leaves numbers in ``output`` that are none until it is waited for, as a device would."""
    assert async_op and isinstance(group, str)
    assert 0 not in output.shape and 0 not in input.shape, "a tensor without elements has no address"
    assert output.is_contiguous() and input.is_contiguous()
    rows = sum(output_split_sizes)
    exchange = cpu_collectives.AllToAll(
        input[: sum(input_split_sizes)], input_split_sizes, output_split_sizes, group, "stand-in"
    )
    output.copy_(output * 0 - 77)

    class Handle:
        def wait(self):
            received = exchange.wait()
            output.copy_(received if rows == output.shape[0] else mint.cat([received, output[rows:]], 0))

    return Handle()


def experts(context, style, ep, tp, problem, with_scores=True, breaks=()):
    """Errors against one device, and how often the stand-ins were called on this rank."""
    with ascend() as calls:
        return parity.errors(context, style, ep, tp, problem, with_scores, breaks), calls


def moe_layer(context, style):
    """Relative errors of a MoE layer on Ascend's code against the portable code: output, tokens' gradient, router's."""
    hp.set_platform("mindspore")
    mesh = whole_mesh("mindspore", context.world_size, 2, 2)["ep", "tp"]
    tokens = np.random.default_rng(3 + mesh.get_local_rank("ep")).standard_normal((10, 6)).astype(np.float32)
    layer = hp.MoE(6, 8, 4, 2, num_shared_experts=1, num_expert_groups=2, num_limited_groups=1)
    random = np.random.default_rng(0)
    for _, parameter in layer.parameters_and_names():
        if parameter.requires_grad:
            parameter.set_data(Tensor(random.standard_normal(parameter.shape).astype(np.float32) / 3))
    getattr(hp, style)().apply(layer.experts, mesh)
    adapter = context.framework

    def run():
        def function(x):
            y = layer(x)
            return adapter.total(y * y), y

        evaluation = adapter.value_and_gradients(function, [adapter.tensor(tokens)], layer)
        gradients = evaluation.parameter_gradients
        return {"output": evaluation.output, "tokens": evaluation.input_gradients[0], **gradients}

    expected = run()
    with ascend() as calls:
        found = run()
    return {name: oracle.relative_error(found[name], expected[name]) for name in expected}, calls


def collectives(context):
    """Every collective of both implementations on the world and on a group of two, empty ones included."""
    mesh = whole_mesh("mindspore", context.world_size, 2, 2)["ep", "tp"]
    group, partner = mesh.get_group("ep"), mesh.get_local_rank("ep")
    x = Tensor(np.arange(12, dtype=np.float32).reshape(6, 2) + 100 * context.rank)
    found = []
    with ascend():
        for module in (ascend_collectives, cpu_collectives):
            send, receive = ((0, 0), (0, 6)) if partner == 0 else ((6, 0), (0, 0))
            started = module.AllToAll(x.T.contiguous().T, (2, 4), ((2, 2), (4, 4))[partner], group, "uneven")
            results = {
                "uneven": started.wait(),
                "one sends all": module.all_to_all(x[: sum(send)], send, receive, group, "a"),
                "scores": module.all_to_all(x[:, 0], (3, 3), (3, 3), group, "b"),
                "none": module.all_to_all(x[:0], (0, 0), (0, 0), group, "c"),
                "sum": module.all_reduce(x[:, 1:], group, "d"),
                "sum of none": module.all_reduce(x[:0], group, "e"),
                "broadcast": module.broadcast(x[2:4], mesh.axis_ranks(0)[1], group, "f"),
                "gather": mint.cat(module.all_gather(x[1:3], group, "g"), 0),
            }
            found.append({name: (value.shape, value.asnumpy().tolist()) for name, value in results.items()})
    return found


def routing(context):
    """The routing operators of both implementations on the same numbers."""
    random = np.random.default_rng(0)
    found = []
    with ascend():
        for module in (ascend_routing, portable_routing):
            results = []
            for tokens in (9, 1, 0):
                scores = Tensor(random.permutation(tokens * 5).reshape(tokens, 5).astype(np.float32))
                selected = module.top_indices(scores, 2)
                marks = module.multi_hot(selected, 5)
                flat = marks.reshape((tokens * 5,))
                results += [selected, marks, module.nonzero(flat, tokens * 2)]
                results += module.sort_by_expert(selected, 6)
            random = np.random.default_rng(0)
            found.append([(value.shape, str(value.dtype), value.asnumpy().tolist()) for value in results])
    return found


def copies_to_host(context, problem):
    """Copies from a device in one forward of sharded experts, and whether the counts passed for host numbers."""
    style = hp.ExpertTensorParallel()
    module = style.apply(make_experts(context, problem), mesh_for(context, style, 2, 2))
    ep_rank = whole_mesh("mindspore", context.world_size, 2, 2).get_local_rank("ep")
    inputs = Tensor(problem.x[ep_rank], ms.float32), Tensor(problem.counts[ep_rank], ms.int64)
    copies = []
    asnumpy = Tensor.asnumpy

    def counting(self):
        copies.append(tuple(self.shape))
        return asnumpy(self)

    with ascend(), mock.patch.object(Tensor, "asnumpy", counting):
        on_host = get_platform(module).on_host(inputs[1])
        with mock.patch.object(ascend_experts, "grouped_matmul_v4", _without_reading):
            module(*inputs)
    return copies, on_host


def _without_reading(x, weight, *, group_list, split_item, group_type, group_list_type):
    return [mint.matmul(x[0], weight[0][0])]


def chosen(context):
    """What the log says when the choice is made, and what a device then runs."""
    with ascend(), mock.patch.object(device.logger, "info") as info:
        modules = device.collectives(), device.experts(), device.routing(), device.rows()
    message, *values = info.call_args.args
    return message % tuple(values), [module.__name__ for module in modules]


def whole_check(context):
    """The check of a cluster on Ascend's code, which no backend of the CPU gives a sum of float64."""
    with ascend(), mock.patch.object(session, "float_types", lambda device_type: ("float32",)):
        return check.main(["--device", "cpu", "--ep", "2", "--tp", "2"])
