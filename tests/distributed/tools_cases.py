"""What people put around a sharded layer on torch: each tool against one device, or what it raises."""

import copy
from unittest import mock

import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import hyper_parallel as hp
from tests.distributed.refusal_cases import message_of
from tests.harness.setting import get_platform_class, whole_mesh

DIM, HIDDEN_DIM, NUM_EXPERTS, STEPS = 16, 32, 4, 2
PLAN = {"experts": hp.ExpertTensorParallel(), "shared_experts": hp.TensorParallel()}


def two_layers(context, shared=1, ep=2, tp=2):
    """A layer over the mesh, the same on one device, and their mesh ("dp", "ep", "tp")."""
    hp.set_platform("torch")
    torch.manual_seed(0)
    whole = hp.MoE(DIM, HIDDEN_DIM, NUM_EXPERTS, 2, num_shared_experts=shared).double()
    layer, mesh = copy.deepcopy(whole), whole_mesh("torch", context.world_size, ep, tp)
    plan = {name: style for name, style in PLAN.items() if shared or name == "experts"}
    return hp.parallelize_module(layer, mesh["ep", "tp"], plan), whole, mesh


def tokens(number):
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(number)).double()


def of_one_device(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def difference(found, expected):
    return float((of_one_device(found) - expected).norm() / expected.norm())


def largest_difference(layer, whole):
    """Of all parameters, and of gradients where there are some."""
    errors = []
    for mine, other in zip(layer.parameters(), whole.parameters(), strict=True):
        errors.append(difference(mine.detach(), other.detach()))
        if other.grad is not None:
            errors.append(difference(mine.grad, other.grad))
    return max(errors)


def backward(layer, whole, mesh, first=0):
    """A step's gradients of both; ep ranks have tokens of their own."""
    ep = mesh["ep"].size()
    layer(tokens(first + mesh.get_local_rank("ep"))).square().sum().backward()
    hp.reduce_gradients(layer.parameters(), mesh["ep"])
    whole(torch.cat([tokens(first + rank) for rank in range(ep)])).square().sum().backward()


def loading(context):
    """State dicts into a sharded layer."""
    layer, whole, _ = two_layers(context)
    state, before = copy.deepcopy(whole).state_dict(), list(layer.experts.parameters())
    found = {
        f"whole tensors, assign {assign}": message_of(lambda assign=assign: layer.load_state_dict(state, assign=assign))
        for assign in (False, True)
    }
    assert all(mine is other for mine, other in zip(before, layer.experts.parameters(), strict=True))
    layer = two_layers(context)[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=True))
    found["set_model_state_dict"] = largest_difference(layer, whole)
    layer.load_state_dict(two_layers(context)[0].state_dict(), assign=True)
    found["shards, assign True"] = largest_difference(layer, whole)
    layer.experts.w1 = nn.Parameter(whole.experts.w1.detach())
    found["whole weight on the module"] = message_of(lambda: layer(tokens(0)))
    return found


class LowRank(nn.Module):
    """w + b a, per expert; ``laid_out(tensor, dim)`` brings a and b to where w is."""

    def __init__(self, weight, laid_out):
        super().__init__()
        num_experts, out_features, in_features = weight.shape
        draw = torch.Generator().manual_seed(1)
        a, b = (
            torch.randn(num_experts, *shape, generator=draw).double() for shape in ((2, in_features), (out_features, 2))
        )
        self.a, self.b = nn.Parameter(laid_out(a, Replicate())), nn.Parameter(laid_out(b, Shard(1)))

    def forward(self, weight):
        return weight + self.b @ self.a


def low_rank(context):
    """Parametrizations on sharded experts, whose own parameters are laid out, or are not."""
    layer, whole, mesh = two_layers(context, shared=0)
    over_mesh = mesh["ep", "tp"]

    def put(module, laid_out, **keywords):
        parametrize.register_parametrization(module.experts, "w1", LowRank(whole_w1, laid_out), **keywords)

    whole_w1 = whole.experts.w1.detach()
    unlike = copy.deepcopy(layer)
    put(whole, lambda tensor, _: tensor)
    put(layer, lambda tensor, over_tp: distribute_tensor(tensor, over_mesh, [Shard(0), over_tp]))
    put(unlike, lambda tensor, _: tensor, unsafe=True)
    backward(layer, whole, mesh)
    return {
        "low rank": largest_difference(layer, whole),
        "low rank, plain": message_of(lambda: unlike(tokens(0))),
        "before the style": message_of(lambda: hp.ExpertTensorParallel().apply(whole.experts, over_mesh)),
    }


def optimizers(context):
    """Steps with an optimizer against one device, or what it raises."""
    adamw, muon = torch.optim.AdamW, torch.optim.Muon

    def stepped(make, set_to_none=True):
        layer, whole, mesh = two_layers(context)
        made = [make(model) for model in (layer, whole)]
        for number in range(STEPS):
            backward(layer, whole, mesh, first=2 * number)
            for of_model in made:
                for optimizer in of_model:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        return largest_difference(layer, whole)

    def by_dims(model):
        flat = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        return muon(flat, lr=0.01), adamw([p for p in model.parameters() if p.ndim == 3], lr=0.01)

    grouped = {"foreach": True}
    found = {
        kind: stepped(lambda model, kind=kind: [getattr(torch.optim, kind)(model.parameters(), lr=0.01)])
        for kind in ("AdamW", "SGD", "Adagrad", "NAdam")
    }
    found["zero_grad(set_to_none=False)"] = stepped(lambda model: [adamw(model.parameters(), lr=0.01)], False)
    found["Muon beside AdamW"] = stepped(by_dims)
    attempts = {
        "foreach, zero_grad(set_to_none=False)": lambda: stepped(
            lambda model: [adamw(hp.parameter_groups(model), lr=0.01, **grouped)], False
        ),
        "Muon for experts": lambda: stepped(lambda model: [muon(model.parameters())]),
        "Adafactor": lambda: stepped(lambda model: [torch.optim.Adafactor(model.parameters())]),
    }
    return found | {name: message_of(attempt) for name, attempt in attempts.items()}


def averages_and_scales(context):
    """Averaged weights, and torch's loss scaler."""
    found = {}
    for name, keywords in {
        "EMA": {"avg_fn": get_ema_avg_fn(0.9)},
        "EMA, multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    }.items():
        layer, whole, _ = two_layers(context)
        averages = [AveragedModel(model, **keywords) for model in (layer, whole)]

        def updated(averages=averages, models=(layer, whole)):
            for _ in range(STEPS):
                for average, model in zip(averages, models):
                    average.update_parameters(model)
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1.1)
            return difference(averages[0](tokens(0)), averages[1](tokens(0)))

        found[name] = updated() if name == "EMA" else message_of(updated)
    layer, _, _ = two_layers(context)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(layer.parameters())
    scaler.scale(layer(tokens(0)).sum()).backward()
    found["GradScaler"] = message_of(lambda: scaler.step(optimizer))
    return found


def fsdp(context):
    """FSDP2 around the layer, experts over dp too: plain, with accumulation, and with parameters on the host."""
    found = {}
    for name, keywords in {
        "accumulation": {},
        "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }.items():
        layer, whole, mesh = two_layers(context, shared=0, tp=1)
        everyone = hp.init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("all",))
        fully_shard(layer.experts, mesh=mesh["dp"], **keywords)
        fully_shard(layer, mesh=everyone, **keywords)
        for part in (layer, layer.experts):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        for number in range(STEPS):
            layer.set_requires_gradient_sync(number == STEPS - 1)
            layer(tokens(4 * number + context.rank)).square().sum().backward()
            whole(torch.cat([tokens(4 * number + rank) for rank in range(4)])).square().sum().backward()
        found[name] = largest_difference(layer, whole)
    return found


def replicated(context):
    """``replicate``, which averages, around all but the experts, whose gradients are sums over ep; and plain DDP."""
    layer, whole, _ = two_layers(context, shared=0, ep=4, tp=1)
    unlike = copy.deepcopy(layer)
    replicate(layer, ignored_modules=[layer.experts])
    layer(tokens(context.rank)).square().sum().backward()
    for parameter in layer.experts.parameters():
        parameter.grad /= context.world_size
    (whole(torch.cat([tokens(rank) for rank in range(4)])).square().sum() / 4).backward()
    return {
        "replicate": largest_difference(layer, whole),
        "DistributedDataParallel": message_of(lambda: nn.parallel.DistributedDataParallel(unlike)),
    }


def scores_under_fsdp(context, cast, known=True):
    """Dtypes of rows, weights and scores within the experts under FSDP2's mixed precision, with and without its cast of
    their inputs, and the gradient of the router's gate. ``known=False`` leaves the scores to FSDP2."""
    layer, _, mesh = two_layers(context, shared=0, tp=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    of_experts = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast)
    layer.float()
    everyone = hp.init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("all",))
    platform, seen = get_platform_class("torch"), []
    run, casts = platform.swiglu_experts, platform.casts_inputs if known else lambda self, module: False

    def watched(self, x, w1, w2, w3, counts, scores):
        seen.extend(str(value.dtype) for value in (x, w1, scores))
        return run(self, x, w1, w2, w3, counts, scores)

    fully_shard(layer.experts, mesh=mesh["dp"], mp_policy=of_experts)
    fully_shard(layer, mesh=everyone, mp_policy=policy)
    with mock.patch.multiple(platform, swiglu_experts=watched, casts_inputs=casts):
        y = layer(tokens(context.rank).float())
        y.float().square().sum().backward()
    return seen, layer.router.gate.weight.grad.full_tensor().numpy()
