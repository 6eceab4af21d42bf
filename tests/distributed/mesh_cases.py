"""Cases about meshes, placements and layouts; the same on every platform."""

import numpy as np

import hyper_parallel as hp
from tests.distributed.error_cases import raised
from tests.harness.setting import whole_mesh


def describe(mesh, names=()):
    """What the contract promises of one mesh."""
    described = {
        "ndim": mesh.ndim,
        "shape": tuple(mesh.shape),
        "names": None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        "size": mesh.size(),
        "sizes": [mesh.size(axis) for axis in range(mesh.ndim)],
        "coordinate": list(mesh.get_coordinate()),
        "local_ranks": [mesh.get_local_rank(axis) for axis in range(mesh.ndim)],
    }
    for name in names:
        described[name] = mesh.get_local_rank(name)
    if mesh.ndim == 1:
        described["only"] = mesh.get_local_rank()
    return described


def contract(context):
    mesh = whole_mesh(context.platform, context.world_size, 2, 2)
    return {
        "class": isinstance(mesh, hp.DeviceMesh),
        "whole": describe(mesh, ("dp", "ep", "tp")),
        "ep": describe(mesh["ep"], ("ep",)),
        "tp": describe(mesh["tp"], ("tp",)),
        "ep, tp": describe(mesh["ep", "tp"], ("ep", "tp")),
        "slice of slice": describe(mesh["ep", "tp"]["tp"], ("tp",)),
        "unknown": raised(lambda: mesh["pp"]),
        "no axis": raised(mesh.get_group),
        "no axis for rank": raised(mesh.get_local_rank),
    }


def members(context):
    """Global ranks of the groups, found out by gathering ranks over them: chunk r comes from mesh coordinate r."""
    mesh = whole_mesh(context.platform, context.world_size, 2, 2)
    found = {}
    for name in ("ep", "tp"):
        group = mesh.get_group(name)
        assert group == mesh[name].get_group() == mesh["ep", "tp"].get_group(name)
        if context.platform == "torch":
            import torch
            import torch.distributed as dist

            gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(gathered, torch.tensor([context.rank]), group=group)
        else:
            from mindspore import Tensor, mint

            gathered = [mint.zeros((1,), dtype=Tensor([1]).dtype) for _ in range(2)]
            mint.distributed.all_gather(gathered, Tensor([context.rank]), group=group)
        found[name] = [int(context.framework.array(value)[0]) for value in gathered]
    return found


def layouts(context):
    """distribute_tensor over (ep, tp) with every pair of placements: local parts, and the whole gathered again."""
    mesh = whole_mesh(context.platform, context.world_size, 2, 2)["ep", "tp"]
    whole = np.arange(32.0, dtype=np.float32).reshape(4, 8) + context.rank  # rank 0's is the one laid out
    pairs = [(a, b) for a in kinds() for b in kinds()]
    result = []
    for pair in pairs:
        laid = hp.distribute_tensor(context.framework.tensor(whole, "float32"), mesh, pair)
        local = context.framework.array(laid.to_local())
        same = laid.device_mesh == mesh or laid.device_mesh is mesh
        result.append((pair, tuple(laid.placements) == pair, same, local, context.framework.array(laid.full_tensor())))
    return mesh.get_coordinate(), result


def kinds():
    return hp.Shard(0), hp.Shard(1), hp.Replicate()


def mindspore_layouts(context):
    """Our placements to MindSpore's Layout and back."""
    from hyper_parallel.platform.mindspore import from_layout, to_layout

    mesh = whole_mesh(context.platform, context.world_size, 2, 2)["ep", "tp"]
    pairs = [(a, b) for a in (hp.Shard(0), hp.Shard(1), hp.Shard(2), hp.Replicate()) for b in kinds()]
    there_and_back = [(pair, from_layout(to_layout(mesh, pair, 3))) for pair in pairs]
    w1 = to_layout(mesh, (hp.Shard(0), hp.Shard(1)), 3).to_dict()
    w2 = to_layout(mesh, (hp.Shard(0), hp.Shard(2)), 3).to_dict()
    return there_and_back, w1, w2, raised(to_layout, mesh, (hp.Partial(), hp.Replicate()), 3)


def hooks(context):
    """distribute_module: partition, input and output functions on a module with one weight."""
    mesh = whole_mesh(context.platform, context.world_size, 2, 2)["ep", "tp"]
    module = scaling(context)
    seen = []

    def partition(name, submodule, device_mesh):
        seen.append((name, device_mesh is mesh))

    def local(value):
        return value.to_local() if hasattr(value, "to_local") else value

    hp.distribute_module(
        module,
        mesh,
        partition,
        lambda mod, inputs, device_mesh: (inputs[0] * 2,),
        lambda mod, output, device_mesh: local(output) + 1,
    )
    return seen, context.framework.array(module(context.framework.tensor([1.0, 2.0], "float32")))


def scaling(context):
    if context.platform == "mindspore":
        from mindspore import Parameter, Tensor, nn

        class Scaling(nn.Cell):
            def __init__(self):
                super().__init__()
                self.weight = Parameter(Tensor(np.array([3.0, 5.0], np.float32)), name="weight")

            def construct(self, x):
                return x * self.weight
    else:
        import torch
        from torch import nn

        class Scaling(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.tensor([3.0, 5.0]))

            def forward(self, x):
                weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
                return x * weight

    return Scaling()
