"""What people put around a layer with adapters, on torch: each against one device."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel import lora
from hyper_parallel.platform.torch.sharding import local
from tests.distributed.refusal_cases import message_of
from tests.distributed.tools_cases import DIM, NUM_EXPERTS, difference, of_one_device, tokens, two_layers

WEIGHTS = ("w1", "w2", "w3")
R, ALPHA = 3, 6


class Sum(nn.Module):
    """``W + alpha / r * B A``, as a parametrization."""

    def __init__(self, a, b):
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight):
        return weight + ALPHA / R * self.B @ self.A


def adapted(context, ep=2, tp=2, dtype=None, seed=1):
    """A layer over the mesh with adapters, the same on one device, and the mesh ("dp", "ep", "tp")."""
    layer, whole, mesh = two_layers(context, shared=0, ep=ep, tp=tp)
    if dtype is not None:
        layer.to(dtype), whole.to(dtype)
    torch.manual_seed(seed)
    lora.add_adapters(layer, R, ALPHA)
    for name in WEIGHTS:
        a, b = (getattr(layer.experts, f"lora_{kind}_{name}") for kind in "AB")
        nn.init.normal_(b, std=0.3)
        hp.synchronize_parameters(layer, mesh, "broadcast")
        factors = (value.full_tensor().detach().clone() for value in (a, b))
        parametrize.register_parametrization(whole.experts, name, Sum(*factors), unsafe=True)
    return layer, whole, mesh


def compared(layer, whole):
    """The largest difference of all factors and their gradients."""
    errors = []
    for name in WEIGHTS:
        expected = whole.experts.parametrizations[name][0]
        for kind in "AB":
            mine, other = getattr(layer.experts, f"lora_{kind}_{name}"), getattr(expected, kind)
            errors += [difference(mine.detach(), other.detach()), difference(mine.grad, other.grad)]
    return max(errors)


def step(layer, whole, batches, rank):
    """A loss of this rank's batch, and of all on one device, and their gradients; the outputs' difference."""
    found, expected = layer(batches[rank]), whole(torch.cat(batches))
    found.square().sum().backward()
    expected.square().sum().backward()
    return difference(found.detach(), expected.detach().chunk(len(batches))[rank])


def around(context, folder):
    """Errors under each tool, and what is refused under FSDP2."""
    found = {}
    layer, whole, mesh = adapted(context, ep=2, tp=1)
    batches = [tokens(number) for number in range(4)]
    step(layer, whole, batches, context.rank)
    hp.reduce_gradients(layer.parameters(), mesh["dp", "ep"])
    found["replicas along dp"] = compared(layer, whole)

    layer, whole, mesh = adapted(context, ep=2, tp=1)
    everyone = hp.init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("all",))
    fully_shard(layer.experts, mesh=mesh["dp"])
    fully_shard(layer, mesh=everyone)
    for part in (layer, layer.experts):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    found["FSDP2, output"] = step(layer, whole, batches, context.rank)
    found["FSDP2"] = compared(layer, whole)
    layer(batches[0])  # parameters that FSDP2 has brought together stay so until a backward pass
    lora.save_adapters(layer, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    for depth, name in zip((2, 1, 0), WEIGHTS):
        a = whole.experts.parametrizations[name][0].A.detach()
        saved = stored["base_model.model.experts." + "base_layer." * depth + "lora_A.weight"]
        found[f"FSDP2, saved {name}"] = difference(saved.reshape(a.shape), a)
    message = message_of(lambda: lora.merge_adapters(layer))

    for name in ("recompute", "compile"):
        layer, whole, mesh = adapted(context)
        rank = mesh.get_local_rank("ep")
        call = {
            "recompute": lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False),
            "compile": torch.compile(layer, backend="eager", fullgraph=True),
        }[name]
        found[f"{name}, output"] = step(call, whole, batches[:2], rank)
        found[name] = compared(layer, whole)
    return found, message


def in_16_bits(context):
    """Dtypes of factors and gradients beside weights in bfloat16, of the output under autocast, and errors against one
    device in float32."""
    layer, whole, mesh = adapted(context, dtype=torch.bfloat16)
    one, rank = whole.float(), mesh.get_local_rank("ep")
    batches = [tokens(number).bfloat16() for number in range(2)]
    y = layer(batches[rank])
    y.float().square().sum().backward()
    one(torch.cat(batches).float()).square().sum().backward()
    a = layer.experts.lora_A_w1
    dtypes = {str(value.dtype) for value in (a, a.grad, layer.experts.lora_B_w2.grad)} | {str(y.dtype)}
    error = compared(layer, one)

    layer, whole, mesh = adapted(context, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(tokens(rank).float())
    return dtypes, error, str(y.dtype), difference(y.detach().float(), whole(tokens(rank).float()).detach())


def refused(context):
    """Of torch alone."""
    layer, _, mesh = two_layers(context, shared=0, ep=2, tp=1)
    fully_shard(layer.experts, mesh=mesh["dp"])
    found = {"after FSDP2": message_of(lambda: lora.add_adapters(layer, R, ALPHA))}
    with torch.device("meta"):
        empty = hp.GroupedExperts(8, 16, 4)
    hp.ExpertTensorParallel().apply(empty, mesh["ep", "tp"])
    found["on meta"] = message_of(lambda: lora.add_adapters(empty, R, ALPHA))
    layer, _, _ = two_layers(context, shared=0)
    learning = [name for name, _ in layer.named_parameters()]
    lora.add_adapters(layer, R, ALPHA, ["experts.w2"])
    assert learning and [n for n, p in layer.named_parameters() if p.requires_grad] == [
        "experts.lora_A_w2",
        "experts.lora_B_w2",
    ]
    assert of_one_device(layer.experts.lora_B_w2).abs().max() == 0
    return found


def kept(context):
    """Bytes that a call keeps for backward beside parameters and inputs, in hidden rows of all its rows: of frozen
    experts, with adapters, and beside a forward of the module's own; and the weights in that unit."""
    mesh, num_rows, hidden_dim = two_layers(context, shared=0, ep=1, tp=1)[2], 8, 512
    found = {}
    for kind in ("frozen", "adapted", "own forward"):
        experts = hp.GroupedExperts(DIM, hidden_dim, NUM_EXPERTS).double()
        if kind == "own forward":
            experts.__class__ = type("Own", (type(experts),), {"forward": lambda self, *inputs: self.run(*inputs)})
        hp.ExpertTensorParallel().apply(experts, mesh["ep", "tp"])
        if kind == "frozen":
            experts.requires_grad_(False)
        else:
            lora.add_adapters(experts, 1, 1)
        x, scores = torch.randn(num_rows, DIM).double().requires_grad_(), torch.rand(num_rows).double().requires_grad_()
        known = {storage_of(value) for value in (x, scores, *map(local, experts.parameters()))}
        sizes = {}

        def keep(tensor, sizes=sizes, known=known):
            if storage_of(tensor) not in known:
                sizes[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        counts = torch.full((NUM_EXPERTS,), num_rows // NUM_EXPERTS)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = experts(x, counts, scores)
        y.sum().backward()
        found[kind] = sum(sizes.values()) / (num_rows * hidden_dim * 8)
    return found, 3 * NUM_EXPERTS * DIM / num_rows


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()
