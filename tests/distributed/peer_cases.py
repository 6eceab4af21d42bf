"""Our experts and TorchTitan's on the same weights, rows and output gradient."""

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

import hyper_parallel as hp
from tests.harness import oracle
from tests.harness.setting import coordinates, fill, make_experts, whole_mesh
from tests.peers import torchtitan


def against_torchtitan(context, ep, tp, problem, whole_output=True):
    """Relative differences of output, row gradient and weight gradients.

    TorchTitan's output is one etp rank's term; ``whole_output`` sums the terms, as its users must.
    """
    titan = torchtitan.load()
    ep_rank, _ = coordinates(context, ep, tp)
    # float32, since TorchTitan pads its rows in a fixed type
    ours = make_experts(context, problem, "float32")
    num_experts, hidden_dim, dim = problem.w1.shape
    theirs = titan.GroupedExperts(dim, hidden_dim, num_experts)
    fill(context, theirs, problem)

    hp.set_platform("torch")
    mesh = whole_mesh("torch", context.world_size, ep, tp)["ep", "tp"]
    hp.ExpertTensorParallel().apply(ours, mesh)
    their_mesh = dist.init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "etp"))
    parallelize_module(theirs, their_mesh, titan.ExpertTensorParallel())

    found = []
    for module in (ours, theirs):
        x = torch.tensor(problem.x[ep_rank], dtype=torch.float32).requires_grad_()
        y = module(x, torch.tensor(problem.counts[ep_rank]))
        y.backward(torch.tensor(problem.targets[ep_rank], dtype=torch.float32))
        y = y.detach().clone()
        if module is theirs and whole_output:
            dist.all_reduce(y, group=their_mesh.get_group("etp"))
        weights = [getattr(module, name).grad.to_local() for name in ("w1", "w2", "w3")]
        found.append([y, x.grad, *weights])
    return [oracle.relative_error(mine.numpy(), other.numpy()) for mine, other in zip(*found)]
