"""MoE layers whose tokens are cut over tp, against one device."""

import copy
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np

import hyper_parallel as hp
from tests.distributed.error_cases import raised
from tests.distributed.variant_cases import DIM, evaluate, make_layer, part, sum_over_ep
from tests.harness import oracle
from tests.harness.recording import recorded
from tests.harness.setting import coordinates, get_platform_class, whole_mesh

# Shape of one ep rank's tokens, the dim that is cut, and what becomes of the shared expert.
INPUTS = {
    "sequence": ((2, 8, DIM), 1, "sharded"),
    "uneven sequence": ((3, 5, DIM), 1, "replicated"),
    "uneven tokens": ((7, DIM), 0, None),
    "one token": ((1, DIM), 0, "sharded"),
}
ETP = "ExpertTensorParallel"
STYLES = (
    ETP,
    "ExpertParallel",
    "TensorParallel",
    "DedupExpertTensorParallel",
    "SplitExpertTensorParallel",
)


def chunk(x, dim, num_ranks, rank):
    """What torch.chunk gives to a rank, in numpy."""
    size = -(-x.shape[dim] // num_ranks)
    return np.take(x, range(min(rank * size, x.shape[dim]), min((rank + 1) * size, x.shape[dim])), dim)


def tokens_of(rank, shape):
    return np.random.default_rng(70 + rank).standard_normal(shape).astype(np.float32)


def cut(context, layer, style, ep, tp, shared, dim=0, **layouts):
    """The layer under a style, with its tokens cut over tp unless ``dim`` is None."""
    style, mesh = getattr(hp, style)(), whole_mesh(context.platform, context.world_size, ep, tp)
    plan = {"experts": style} | ({"shared_experts": hp.TensorParallel()} if shared == "sharded" else {})
    if dim is not None:
        plan[""] = hp.MoESequenceParallel(**{"input_layouts": (hp.Shard(dim),), **layouts})
    for pattern, one in plan.items():
        hp.parallelize_module(layer, mesh[one.mesh_dim_names], {pattern: one})
    return layer


def with_every_style(context, ep, tp, inputs, breaks=(), styles=STYLES, layouts=None):
    """Errors of each style."""
    shape, _, shared = INPUTS[inputs]
    more = {"num_shared_experts": 1, "shared_gate": True} if shared else {}
    one = make_layer(context, 2, **more, score_func="sigmoid", route_norm=True)
    whole = evaluate(context, copy.deepcopy(one), np.stack([tokens_of(rank, shape) for rank in range(ep)]))
    return {
        style: _errors(context, copy.deepcopy(one), whole, style, ep, tp, inputs, breaks, layouts or {})
        for style in styles
    }


def _errors(context, layer, whole, style, ep, tp, inputs, breaks, layouts):
    shape, dim, shared = INPUTS[inputs]
    layer = cut(context, layer, style, ep, tp, shared, dim, **layouts)
    mesh, (ep_rank, tp_rank) = whole_mesh(context.platform, context.world_size, ep, tp), coordinates(context, ep, tp)
    given, wanted = (hp.Replicate() not in layouts.get(f"{end}_layouts", ()) for end in ("input", "output"))
    with sabotage(context, *breaks):
        x = tokens_of(ep_rank, shape)
        found = evaluate(context, layer, chunk(x, dim, tp, tp_rank) if given else x)

    def mine(array, is_cut):
        return chunk(array[ep_rank], dim, tp, tp_rank) if is_cut else array[ep_rank]

    errors = {
        "output": (found.output, mine(whole.output, wanted)),
        "x": (found.input_gradients[0], mine(whole.input_gradients[0], given)),
    }
    for name, expected in whole.parameter_gradients.items():
        gradient = found.parameter_gradients[name]
        if name.startswith("experts."):
            places = ep if "Expert" in style else 1, tp if "Tensor" in style else 1
            expected = part(expected, name, *places, ep_rank % places[0], tp_rank % places[1])
            if "Expert" in style:
                errors[name] = gradient, expected
                continue
        elif name.startswith("shared_experts.") and shared == "sharded":
            expected = np.split(expected, tp, 1 if ".w2." in name else 0)[tp_rank]
        errors[name] = sum_over_ep(context, gradient, mesh), expected
    counted = context.framework.array(layer.tokens_per_expert)
    assert counted.sum() == 2 * np.prod(shape[:-1]), counted  # all tokens of the tp ranks, on each of them
    return {name: relative_error(*pair) for name, pair in errors.items()}


def relative_error(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return oracle.relative_error(found, expected) if expected.size else 0.0


@contextmanager
def sabotage(context, *kinds):
    """Break the border of the layer in a known way."""
    platform = get_platform_class(context.platform)
    gather = platform.gather_tokens

    def both(index):
        return lambda self, *arguments: (gather(self, *arguments)[index],) * 2

    breaks = {
        "terms taken for complete": {"gather_tokens": both(0)},
        "complete taken for terms": {"gather_tokens": both(1)},
        "no sum": {
            "scatter_tokens": lambda self, terms, complete, splits, *rest: self.split_over_group(
                terms + complete, splits, *rest[:2]
            )
        },
        "complete summed too": {
            "scatter_tokens": lambda self, terms, complete, *rest, original=platform.scatter_tokens: original(
                self, terms + complete, None, *rest
            )
        },
    }
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.multiple(platform, **breaks[kind]))
        yield


def traffic(context, style, ep, tp, is_cut):
    """Collectives of matrices over tp, of forward and of backward, as (verb, bytes that leave the rank, shape).

    Without the style the tokens of each rank are gathered before the layer, and its output is cut behind it.
    """
    layer = cut(context, make_layer(context, 2), style, ep, tp, None, 0 if is_cut else None)
    mesh, adapter, forward = whole_mesh(context.platform, context.world_size, ep, tp), context.framework, []
    group, platform = mesh.get_group("tp"), hp.get_platform(layer)
    splits, ep_rank, tp_rank = [16 // tp] * tp, *coordinates(context, ep, tp)
    ranks = tuple(mesh["tp"].mesh.tolist())

    def function(x):
        if is_cut:
            y = layer(x)
        else:
            y = layer(platform.gather_from_group(x, splits, group, "test"))
            y = platform.split_over_group(y, splits, group, "test")
        forward.extend(calls)
        return adapter.total(y * y), y

    with recorded(context) as calls:
        x = adapter.tensor(chunk(tokens_of(ep_rank, (16, DIM)), 0, tp, tp_rank))
        adapter.value_and_gradients(function, [x], layer)
    return [
        [(call.verb, _leaving(call, tp), call.shape) for call in some if call.ranks == ranks and len(call.shape) == 2]
        for some in (calls[: len(forward)], calls[len(forward) :])
    ]


def _leaving(call, size):
    """Bytes that leave the rank, for a ring; of point-to-point messages what is sent."""
    times = {"all_reduce": 2 * (size - 1) / size, "all_gather": size - 1, "all_gather_into_tensor": size - 1}
    times |= {"dist_comm_isend_op": 1, "dist_comm_irecv_op": 0}
    return call.payload * times.get(call.verb, (size - 1) / size)


def reduced(context, names):
    """Errors after ``reduce_gradients`` over the named axes: of a weight in front of the layer, which sees this rank's
    tokens only, and of the layer's own."""
    ep, tp = 2, 2
    one = make_layer(context, 2, num_shared_experts=1)
    layer = cut(context, copy.deepcopy(one), "ExpertParallel", ep, tp, "replicated", 0)
    mesh, (ep_rank, tp_rank) = whole_mesh(context.platform, context.world_size, ep, tp), coordinates(context, ep, tp)
    scale = np.random.default_rng(1).uniform(0.5, 1.5, DIM)
    batches = [tokens_of(rank, (10, DIM)) for rank in range(ep)]
    mine = _gradients(context, layer, scale, chunk(batches[ep_rank], 0, tp, tp_rank), mesh[names])
    whole = _gradients(context, one, scale, np.concatenate(batches))
    errors = {}
    for name, expected in whole.items():
        if name.startswith("experts."):
            expected = part(expected, name, ep, 1, ep_rank, 0)
        errors[name] = oracle.relative_error(mine[name], expected)
    return errors


def _gradients(context, layer, scale, x, mesh=None):
    """Gradients by name, "scale" too, reduced over the mesh."""
    adapter = context.framework
    x = adapter.tensor(x)
    if context.platform == "torch":
        import torch

        weight = torch.nn.Parameter(adapter.tensor(scale))
        named = {"scale": weight, **dict(layer.named_parameters())}
        layer(x * weight).square().sum().backward()
        if mesh is not None:
            hp.reduce_gradients(list(named.values()), mesh)
        return {name: adapter.array(_local(p.grad)) for name, p in named.items()}
    import mindspore as ms

    weight = ms.Parameter(adapter.tensor(scale), name="scale")
    named = {"scale": weight, **{name: p for name, p in layer.parameters_and_names() if p.requires_grad}}
    parameters = list(named.values())
    _, gradients = ms.value_and_grad(lambda x: layer(x * weight).square().sum(), None, tuple(parameters))(x)
    if mesh is not None:
        gradients = hp.reduce_gradients(parameters, mesh, gradients)
    return {name: adapter.array(gradient) for name, gradient in zip(named, gradients)}


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def refusals(context):
    """What wrong layouts, meshes and tokens raise: (kind, message) by name."""
    hp.set_platform(context.platform)
    adapter, found = context.framework, {}
    mesh, rank = whole_mesh(context.platform, context.world_size, 2, 2), context.rank

    def attempt(name, function):
        found[name] = raised(function)

    def layer(style="ExpertTensorParallel", **layouts):
        return cut(context, make_layer(context, 2), style, 2, 2, None, **layouts)

    attempt("no shard", lambda: hp.MoESequenceParallel(input_layouts=hp.Replicate()))
    attempt("two dims", lambda: hp.MoESequenceParallel(input_layouts=hp.Shard(0), output_layouts=hp.Shard(1)))
    attempt("partial", lambda: hp.MoESequenceParallel(output_layouts=hp.Partial()))
    attempt("two inputs", lambda: hp.MoESequenceParallel(input_layouts=(hp.Shard(1), hp.Shard(1))))
    attempt("no layer", lambda: hp.MoESequenceParallel().apply(make_layer(context, 2).experts, mesh["tp"]))
    attempt("other axis", lambda: hp.MoESequenceParallel().apply(make_layer(context, 2), mesh["ep"]))
    attempt("twice", lambda: hp.MoESequenceParallel().apply(layer(), mesh["tp"]))
    attempt("last dim", lambda: layer(dim=1)(adapter.tensor(np.ones((4, DIM)))))
    other = make_layer(context, 2)
    hp.ExpertTensorParallel().apply(other.experts, mesh["ep", "tp"])
    hp.MoESequenceParallel(input_layouts=hp.Shard(0), tp_axis="ep").apply(other, mesh["ep"])
    attempt("other ranks", lambda: other(adapter.tensor(np.ones((4, DIM)))))
    attempt("dtypes", lambda: layer()(adapter.tensor(np.ones((4, DIM)), "float16" if rank % 2 else "float32")))
    attempt("batches", lambda: layer(dim=1)(adapter.tensor(np.ones((2 + rank % 2, 4, DIM)))))
    attempt("local output", lambda: layer(use_local_output=False))
    return found


def with_dtensors(context, given):
    """torch: errors of output and gradient where both are DTensors of an uneven sequence, given cut or whole; and how
    often the ranks asked each other for their numbers of tokens."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    adapter, one = context.framework, make_layer(context, 2)
    layer = cut(context, copy.deepcopy(one), ETP, 1, 4, None, 1, use_local_output=False)
    mesh = whole_mesh("torch", context.world_size, 1, 4)["tp"]
    x = adapter.tensor(tokens_of(0, (2, 5, DIM)))
    placement = {"cut": Shard(1), "whole": Replicate()}[given]
    spread = distribute_tensor(x, mesh, [placement]).requires_grad_()
    with recorded(context) as calls:
        y = layer(spread)
    assert y.placements == (Shard(1),) and y.shape == x.shape
    (y * y).sum().backward()
    assert spread.grad.placements == (placement,)
    whole = evaluate(context, one, tokens_of(0, (2, 5, DIM)))
    found = {"output": (y.full_tensor(), whole.output), "x": (spread.grad.full_tensor(), whole.input_gradients[0])}
    errors = {name: oracle.relative_error(adapter.array(value), expected) for name, (value, expected) in found.items()}
    return errors, sum(call.shape == (4 * 6,) for call in calls)
