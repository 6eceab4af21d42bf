"""MoE layers with balanced routing, and the bytes that they hand to collectives on this rank."""

from collections import Counter
from contextlib import contextmanager
from itertools import combinations
from unittest import mock

import numpy as np

import hyper_parallel as hp
from tests.harness.recording import recorded
from tests.harness.setting import get_platform_class, mesh_for, to_dtype, whole_mesh

DIM, HIDDEN, NUM_EXPERTS, TOP_K, NUM_LAYERS = 6, 16, 8, 2, 2


def balanced_ids(num_tokens):
    """Every choice of K of the E experts equally often, in an order that repeats."""
    choices = np.array(list(combinations(range(NUM_EXPERTS), TOP_K)))
    assert num_tokens % len(choices) == 0
    return np.tile(choices, (num_tokens // len(choices), 1))


@contextmanager
def balanced_routing(context, num_tokens):
    ids = context.framework.int_tensor(balanced_ids(num_tokens))
    with mock.patch.object(get_platform_class(context.platform), "top_indices", lambda self, x, k: ids + 0):
        yield


def make_layers(context, style, ep, tp, shared, dtype, num_layers=NUM_LAYERS, sequence_parallel=False):
    """Layers on the mesh that the style wants, their tokens cut over tp or not."""
    hp.set_platform(context.platform)
    style = getattr(hp, style)()
    mesh = mesh_for(context, style, ep, tp)
    layers = []
    for _ in range(num_layers):
        layer = to_dtype(context, hp.MoE(DIM, HIDDEN, NUM_EXPERTS, TOP_K, num_shared_experts=int(shared)), dtype)
        style.apply(layer.experts, mesh)
        if shared and tp > 1:
            hp.TensorParallel().apply(layer.shared_experts, mesh if mesh.ndim == 1 else mesh["tp"])
        if sequence_parallel:
            hp.MoESequenceParallel(input_layouts=hp.Shard(0)).apply(layer, mesh if mesh.ndim == 1 else mesh["tp"])
        layers.append(layer)
    return layers


def handed_over(
    context, style, ep, tp, num_tokens, shared=False, dtype="float32", recompute=False, sequence_parallel=False
):
    """Bytes by (axis, "forward" or "backward", whether they are rows of the model's width) of one call and its
    backward; among point-to-point messages what is sent."""
    layers = make_layers(context, style, ep, tp, shared, dtype, sequence_parallel=sequence_parallel)
    adapter = context.framework
    own = num_tokens // tp if sequence_parallel else num_tokens
    x = adapter.tensor(np.random.default_rng(context.rank // tp).standard_normal((own, DIM)), dtype)
    forward = Counter()
    with balanced_routing(context, num_tokens), recorded(context) as calls:

        def function(x):
            y = x
            for layer in layers:
                y = _recomputed(layer, y) if recompute else layer(y)
            forward.update(_by_axis(context, ep, tp, calls))
            return adapter.total(y), y

        adapter.value_and_gradients(function, [x], layers[0])
    both = _by_axis(context, ep, tp, calls)
    found = {(*key, "forward"): n for key, n in forward.items()}
    return found | {(*key, "backward"): n - forward[key] for key, n in both.items()}


def _recomputed(layer, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x, use_reentrant=False)


def _by_axis(context, ep, tp, calls):
    mesh = whole_mesh(context.platform, context.world_size, ep, tp)
    ranks = {axis: tuple(_ranks(context, mesh.get_group(axis))) for axis in ("ep", "tp")}
    found = Counter()
    for call in calls:
        if call.verb == "dist_comm_irecv_op":
            continue
        axis = next(axis for axis, of_axis in ranks.items() if of_axis == call.ranks)
        kind = "rows" if len(call.shape) == 2 and call.shape[1] == DIM and call.verb != "all_reduce" else "other"
        found[axis, kind] += call.payload
    return found


def _ranks(context, group):
    if context.platform == "torch":
        import torch.distributed as dist

        return dist.get_process_group_ranks(group)
    import mindspore.communication as comm

    return comm.get_process_group_ranks(group)


def states_of_a_model(context, style, ep, tp, dtype, optimizer, **sizes):
    """Bytes of the parameters, of the experts' among them, of gradients, and of optimizer states after one step."""
    import torch

    from tests.distributed.plan_torch_model import LanguageModel

    model, mesh_style = LanguageModel(**sizes).to(getattr(torch, dtype)), getattr(hp, style)()
    mesh = mesh_for(context, mesh_style, ep, tp)
    for layer in model.layers:
        mesh_style.apply(layer.moe.experts, mesh)
        if layer.moe.shared_experts is not None and tp > 1:
            hp.TensorParallel().apply(layer.moe.shared_experts, mesh["tp"])
    ids = torch.arange(16) % sizes["vocab_size"]
    model(ids).sum().backward()
    made = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer.split("-")[0]]
    made = made(model.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer == "momentum" else {}))
    made.step()
    local = {name: _local(p) for name, p in model.named_parameters()}
    states = [_local(t) for state in made.state.values() for key, t in state.items() if key != "step" and t is not None]
    return {
        "parameters": _bytes(local.values()),
        "expert_parameters": _bytes(p for name, p in local.items() if ".moe.experts." in name),
        "gradients": _bytes(_local(p.grad) for p in model.parameters()),
        "optimizer": _bytes(states),
    }


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kept(context, style, ep, tp, num_tokens, shared, dtype, sequence_parallel=False):
    """Bytes that the benchmark's counter finds alive after the forward of one layer, without its output."""
    import torch

    from tests.benchmark import measures

    (layer,) = make_layers(context, style, ep, tp, shared, dtype, 1, sequence_parallel)
    own = num_tokens // tp if sequence_parallel else num_tokens
    x = torch.randn(own, DIM, dtype=getattr(torch, dtype), requires_grad=True)
    with balanced_routing(context, num_tokens):
        found = measures.memory(_Call(layer, x))["kept"]
    return found - x.numel() * x.element_size()


class _Call:
    """A layer as ``tests.benchmark.measures`` takes it."""

    def __init__(self, module, x):
        self._module, self._x = module, x

    def forward(self):
        return self._module(self._x)

    def backward(self, y):
        y.backward(y.detach())

    def clear(self):
        for leaf in (self._x, *self._module.parameters()):
            leaf.grad = None
