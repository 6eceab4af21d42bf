"""The torch side of checkpoint_cases, and what only torch has: FSDP2 and torch's own distributed checkpoints."""

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import hyper_parallel as hp
from hyper_parallel import checkpoint
from hyper_parallel.platform.torch import state as room
from tests.harness.setting import whole_mesh

__all__ = ["room", "model", "adamw", "step", "whole", "draw"]


class Model(nn.Module):
    def __init__(self, dim, hidden, experts):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.moe = hp.MoE(dim, hidden, experts, 2, num_shared_experts=1, bias_update_rate=0.1)

    def forward(self, x):
        return self.last(self.moe(self.norm(torch.tanh(self.first(x)))))


def model(dim, hidden, experts, dtype):
    built = Model(dim, hidden, experts).to(getattr(torch, dtype))
    return built


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.02, foreach=False)


def step(module, optimizer, x, num_tokens, reduced):
    optimizer.zero_grad()
    y = module(torch.tensor(x).to(module.first.weight.dtype))
    (y.square().sum() / num_tokens + y.sum() / num_tokens).backward()
    for parameter in module.parameters():
        if isinstance(parameter.grad, DTensor):
            local = parameter.grad.to_local()
            local.copy_(reduced(parameter, local))
        else:
            parameter.grad = reduced(parameter, parameter.grad)
    optimizer.step()


def whole(module):
    tensors = {**dict(module.named_parameters()), "moe.expert_bias": module.moe.expert_bias}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().numpy().copy() for name, tensor in full.items()}


def draw(seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return torch.rand(3).tolist()


def read_by_torch(context, folder, ep, tp):
    """A checkpoint's model, read on another mesh by torch's plain distributed checkpoint."""
    from tests.distributed.checkpoint_cases import made

    _, sharded, _, _ = made(context, "ExpertTensorParallel", ep, tp, "float64", seed=2)
    state = sharded.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{folder}/model"))
    sharded.load_state_dict(state)
    return whole(sharded)


def _fsdp(context, shape, seed):
    from tests.distributed.checkpoint_cases import DIM, EXPERTS, HIDDEN

    mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    torch.manual_seed(seed)
    built = model(DIM, HIDDEN, EXPERTS, "float64")
    truth = {name: parameter.detach().clone().numpy() for name, parameter in built.named_parameters()}
    hp.parallelize_module(built, mesh["ep", "tp"], {"moe.experts": hp.ExpertTensorParallel()})
    fully_shard(built.moe.experts, mesh=mesh["dp"])
    fully_shard(built, mesh=mesh["dp", "ep"]._flatten("dp_ep"))
    return built, truth


def fsdp(context, folder, shape, other):
    """Placements of an FSDP2 model over one mesh, and its largest error after loading it over another."""
    built, truth = _fsdp(context, shape, 1)
    checkpoint.save(folder, built, adamw(built))
    loaded, _ = _fsdp(context, other, 2)
    checkpoint.load(folder, loaded, adamw(loaded))
    parameters = dict(loaded.named_parameters())
    error = max(np.abs(parameters[name].full_tensor().detach().numpy() - truth[name]).max() for name in truth)
    return str(built.moe.experts.w1.placements), error


def partial_is_refused(context, folder):
    mesh = whole_mesh("torch", 4, 2, 2)["tp"]
    holder = nn.Module()
    holder.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    try:
        checkpoint.save(folder, holder)
    except checkpoint.CheckpointError as error:
        return str(error)
    return None


def uneven(context, folder):
    """A tensor of 5 rows over 4 ranks, one of which holds none."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    values = torch.arange(15.0).reshape(5, 3)
    holder = nn.Module()
    holder.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    checkpoint.save(folder, holder)
    with torch.no_grad():
        holder.weight.to_local().zero_()
    checkpoint.load(folder, holder)
    return tuple(holder.weight.to_local().shape), torch.equal(holder.weight.full_tensor(), values)
