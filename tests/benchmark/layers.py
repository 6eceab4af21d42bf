"""The layers that are compared, built on this rank: ours and TorchTitan's, with the same weights and inputs.

TorchTitan's output is one etp rank's term of a sum. Its users must sum it; here that is one all-reduce in place, the
cheapest form of the redistribution that its recipe makes (``PrepareModuleInputOutput`` with a ``Partial`` output): of
the rows for the experts layer, of the tokens ``[T, D]`` for the MoE layer. Its gate stays a plain module, which costs
less than the DTensor that its recipe makes of it. In bf16 its products are ``torch._grouped_mm``, its default, or its
loop over experts, whichever is faster here.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

import hyper_parallel as hp
from tests.benchmark.floor import Floor
from tests.benchmark.inputs import make_batch, make_weights
from tests.benchmark.timing import processor_time
from tests.peers import torchtitan

__all__ = ["Layer", "build", "output_and_gradients"]


class Layer:
    """A module on fixed inputs, with a fixed gradient of its output."""

    def __init__(self, module, inputs, grad, summed_over=None):
        self.module, self._inputs, self._grad, self._group = module, inputs, grad, summed_over

    def forward(self):
        y = self.module(*self._inputs)
        if self._group is not None:
            dist.all_reduce(y.detach(), group=self._group)
        return y

    def backward(self, y):
        y.backward(self._grad)

    def clear(self):
        for leaf in (self._inputs[0], *self.module.parameters()):
            leaf.grad = None

    def gradients(self):
        found = {"x": self._inputs[0].grad}
        for name, parameter in self.module.named_parameters():
            found[name] = parameter.grad
        return {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in found.items()}


def build(work, alone=False):
    """The contenders by name, in the order in which they run, notes on how they run, and the mesh.

    Args:
        alone: build ours and the floor only.
    """
    hp.set_platform("torch")
    mesh = hp.init_device_mesh("cpu", (work.ep, work.tp), mesh_dim_names=("ep", "tp"))
    ep_rank, tp_rank = mesh.get_coordinate()
    weights = make_weights(work.shape)
    shards = {"gate": weights.gate_ED, **weights.shards(work, ep_rank, tp_rank)}
    batch = make_batch(work, ep_rank, weights.gate_ED)
    found = {"ours": _ours(work, mesh, shards, batch)}
    if torchtitan.installed() and not alone:
        found["titan"] = _titan(work, shards, batch)
    if work.layer == "moe" and not alone:
        found["scores inside"] = _ours(work, mesh, shards, batch, score_position="inside")
        if work.ep > 1:
            found["dedup"] = _ours(work, mesh, shards, batch, hp.DedupExpertTensorParallel)
        if work.tp > 1:
            found["split"] = _ours(work, mesh, shards, batch, hp.SplitExpertTensorParallel)
    found["floor"] = Floor(work, batch, shards, mesh.get_group("ep"), mesh.get_group("tp"))
    notes = {"floor": found["floor"].choices}
    if "titan" in found:
        notes["titan"] = _faster_products(work, found["titan"])
    return found, notes, mesh


def output_and_gradients(layer):
    layer.clear()
    y = layer.forward()
    layer.backward(y)
    return {"output": y.detach().reshape(-1, y.shape[-1]), **layer.gradients()}


def _ours(work, mesh, shards, batch, style=hp.ExpertTensorParallel, **arguments):
    shape = work.shape
    with torch.device("meta"):
        if work.layer == "experts":
            module = experts = hp.GroupedExperts(shape.dim, shape.hidden_dim, shape.num_experts)
        else:
            # TorchTitan multiplies rows by scores before the experts, unless told otherwise.
            arguments = {"score_position": "before", **arguments}
            module = hp.MoE(shape.dim, shape.hidden_dim, shape.num_experts, shape.top_k, **arguments)
            experts = module.experts
    style().apply(experts, mesh)
    _materialise(work, module, experts, shards)
    return Layer(module, *_inputs(work, batch))


def _titan(work, shards, batch):
    titan, shape = torchtitan.load(), work.shape
    with torch.device("meta"):
        if work.layer == "experts":
            module = experts = titan.GroupedExperts(shape.dim, shape.hidden_dim, shape.num_experts)
        else:
            args = titan.MoEArgs(
                num_experts=shape.num_experts,
                num_shared_experts=0,
                top_k=shape.top_k,
                score_func="softmax",
                use_grouped_mm=False,
                load_balance_coeff=None,
            )
            module = titan.MoE(args, shape.dim, shape.hidden_dim)
            experts = module.experts
    mesh = dist.init_device_mesh("cpu", (work.ep, work.tp), mesh_dim_names=("ep", "etp"))
    parallelize_module(experts, mesh, titan.ExpertTensorParallel())
    _materialise(work, module, experts, shards)
    (x, *counts), grad = _inputs(work, batch)
    if work.layer == "moe":  # it wants [B, S, D]
        x, grad = x.detach().unsqueeze(0).requires_grad_(), grad.unsqueeze(0)
    return Layer(module, (x, *counts), grad, summed_over=mesh.get_group("etp") if work.tp > 1 else None)


@torch.no_grad()
def _materialise(work, module, experts, shards):
    """Give a module of the meta device, sharded there, its memory and its values."""
    module.to(getattr(torch, work.dtype)).to_empty(device="cpu")
    for buffer in module.buffers():
        buffer.zero_()
    for name in ("w1", "w2", "w3"):
        getattr(experts, name).to_local().copy_(torch.from_numpy(shards[name]))
    if work.layer == "moe":
        module.router.gate.weight.copy_(torch.from_numpy(shards["gate"]))


def _inputs(work, batch):
    dtype = getattr(torch, work.dtype)
    if work.layer == "experts":
        x, grad, counts = batch.rows_RD, batch.grad_RD, (torch.from_numpy(batch.counts_E),)
    else:
        x, grad, counts = batch.tokens_TD, batch.grad_TD, ()
    return (torch.from_numpy(x).to(dtype).requires_grad_(), *counts), torch.from_numpy(grad).to(dtype)


def _faster_products(work, layer):
    """Let TorchTitan's experts use what is faster in this dtype, and say what that is."""
    if work.dtype != "bfloat16":  # its grouped products always compute in bf16
        return "loop over experts"
    experts = getattr(layer.module, "experts", layer.module)
    took = {}
    for grouped in (False, True):
        experts.use_grouped_mm = grouped
        took[grouped] = torch.tensor(min(processor_time(lambda: output_and_gradients(layer)) for _ in range(3)))
        dist.all_reduce(took[grouped])
    experts.use_grouped_mm = bool(took[True] < took[False])
    layer.clear()
    return "_grouped_mm" if experts.use_grouped_mm else "loop over experts"
