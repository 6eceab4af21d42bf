"""Cases for what only torch has: dtypes, meta device, checkpointing, compile, autocast, torch's own parallel API."""

import copy

import numpy as np
import torch
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.harness import oracle, parity
from tests.harness.setting import coordinates, make_experts, mesh_for, whole_mesh


def sharded(context, ep, tp, problem, dtype=None):
    style = hp.ExpertTensorParallel()
    return style.apply(make_experts(context, problem, dtype), mesh_for(context, style, ep, tp))


def in_dtype(context, problem, dtype):
    """Relative errors of outputs and gradients in a dtype, of the sharded experts and of one device."""
    ep_rank, _ = coordinates(context, 2, 2)
    found = {}
    for where, experts in (
        ("etp", sharded(context, 2, 2, problem, dtype)),
        ("one", make_experts(context, problem, dtype)),
    ):
        x = torch.tensor(problem.x[ep_rank]).to(getattr(torch, dtype)).requires_grad_()
        scores = torch.tensor(problem.scores[ep_rank], dtype=torch.float32).requires_grad_()
        y = experts(x, torch.tensor(problem.counts[ep_rank]), scores)
        y.sum().backward()
        x_RD, counts_E, scores_R = problem.x[ep_rank], problem.counts[ep_rank], problem.scores[ep_rank]
        weights = problem.w1, problem.w2, problem.w3
        expected = oracle.grouped_experts_gradients(np.ones_like(x_RD), x_RD, counts_E, *weights, scores_R)
        found[where] = {
            "dtypes": [str(t.dtype) for t in (y, x.grad, scores.grad, experts.w1.grad)],
            "output": oracle.relative_error(
                y.detach().double().numpy(), oracle.grouped_experts(x_RD, counts_E, *weights, scores_R)
            ),
            "x": oracle.relative_error(x.grad.double().numpy(), expected.x),
            "scores": oracle.relative_error(scores.grad.double().numpy(), expected.scores),
        }
    return found


class Block(torch.nn.Module):
    """Dense in, experts, dense out; the experts may run under activation checkpointing."""

    def __init__(self, experts, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        dim = experts.w1.shape[2]
        self.before, self.after = torch.nn.Linear(dim, dim).double(), torch.nn.Linear(dim, dim).double()
        self.experts, self.use_reentrant = experts, use_reentrant

    def forward(self, x, counts):
        x = torch.tanh(self.before(x))
        if self.use_reentrant is None:
            x = self.experts(x, counts)
        else:
            x = checkpoint(self.experts, x, counts, use_reentrant=self.use_reentrant)
        return self.after(x)


def block_gradients(block, x, counts):
    x = torch.tensor(x).requires_grad_()
    y = block(x, torch.tensor(counts))
    y.square().sum().backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in block.parameters()]
    return [t.detach().numpy() for t in (y, x.grad, *gradients)]


def checkpointed(context, problem):
    """Plain, non-reentrant and reentrant checkpointing: all values must agree."""
    ep_rank, _ = coordinates(context, 2, 2)
    return [
        block_gradients(Block(sharded(context, 2, 2, problem), reentrant), problem.x[ep_rank], problem.counts[ep_rank])
        for reentrant in (None, False, True)
    ]


def compiled(context, problem, backend):
    """A compiled block on two routings, and the block itself."""
    ep_rank, _ = coordinates(context, 2, 2)
    block = Block(sharded(context, 2, 2, problem))
    fast = torch.compile(copy.deepcopy(block), backend=backend)
    routings = problem.counts[ep_rank], problem.counts[ep_rank][::-1].copy()
    results = []
    for counts in routings:
        block.zero_grad()
        fast.zero_grad()
        plain = block_gradients(block, problem.x[ep_rank], counts)
        results.append((plain, block_gradients(fast, problem.x[ep_rank], counts)))
    return results


def from_meta(context):
    """Built on the meta device, sharded, materialised and drawn: the weights one device would draw, and a forward."""
    with torch.device("meta"):
        experts = hp.GroupedExperts(6, 8, 4)
    style = hp.ExpertTensorParallel()
    style.apply(experts, mesh_for(context, style, 2, 2))
    was_meta = experts.w1.to_local().is_meta
    experts.to_empty(device="cpu")
    torch.manual_seed(3)
    experts.reset_parameters()
    torch.manual_seed(3)
    one = hp.GroupedExperts(6, 8, 4)
    x, counts = torch.randn(8, 6), torch.tensor([3, 0, 1, 4])
    same = [torch.equal(getattr(experts, name).full_tensor(), getattr(one, name)) for name in ("w1", "w2", "w3")]
    return was_meta, same, (experts(x, counts) - one(x, counts)).abs().max().item(), one(x, counts).abs().max().item()


def torchs_own_parallelize_module(context, problem):
    """torch's parallelize_module with our style on the 2-D mesh; ours with torch's style beside ETP."""
    mesh = whole_mesh("torch", context.world_size, 2, 2)["ep", "tp"]
    block = Block(make_experts(context, problem))
    torch_parallelize_module(block, mesh, {"experts": hp.ExpertTensorParallel()})
    ours = hp.parallelize_module(
        Block(make_experts(context, problem)),
        mesh,
        {"experts": hp.ExpertTensorParallel(), "before": ColwiseParallel(output_layouts=hp_replicate())},
    )
    ep_rank, _ = coordinates(context, 2, 2)
    plain = block_gradients(Block(sharded(context, 2, 2, problem)), problem.x[ep_rank], problem.counts[ep_rank])
    by_torch = block_gradients(block, problem.x[ep_rank], problem.counts[ep_rank])
    beside = ours(torch.tensor(problem.x[ep_rank]), torch.tensor(problem.counts[ep_rank])).detach().numpy()
    return plain, by_torch, beside, type(ours.before.weight).__name__


def hp_replicate():
    from torch.distributed.tensor import Replicate

    return Replicate()


def autocast(context, problem):
    """Under autocast fp32 weights compute in bf16, as they do on one device."""
    ep_rank, _ = coordinates(context, 2, 2)
    experts = sharded(context, 2, 2, problem, "float32")
    one = make_experts(context, problem, "float32")
    x = torch.tensor(problem.x[ep_rank], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = (module(x, torch.tensor(problem.counts[ep_rank])) for module in (experts, one))
    y.float().sum().backward()
    return str(y.dtype), str(experts.w1.grad.dtype), oracle.relative_error(y.detach().float(), z.detach().float())


class PlainExperts(torch.nn.Module):
    """A user's module: written for plain tensors, counts its calls, needs no other change."""

    def __init__(self, dim, hidden_dim, num_experts):
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = torch.nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = torch.nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.calls = 0

    def forward(self, rows, counts):
        self.calls += 1
        pieces = []
        for e, x in enumerate(rows.split(counts.tolist())):
            pieces.append((torch.nn.functional.silu(x @ self.w1[e].t()) * (x @ self.w3[e].t())) @ self.w2[e].t())
        return torch.cat(pieces)


def users_module(context, problem):
    num_experts, hidden_dim, dim = problem.w1.shape
    experts = PlainExperts(dim, hidden_dim, num_experts)
    for name in ("w1", "w2", "w3"):
        context.framework.set_parameter(experts, name, getattr(problem, name))
    style = hp.ExpertTensorParallel()
    style.apply(experts.double(), mesh_for(context, style, 2, 2))
    ep_rank, _ = coordinates(context, 2, 2)
    evaluation = parity.evaluate(context, experts, problem, ep_rank, with_scores=False)
    return parity.compare(context, evaluation, problem, 2, 2, with_scores=False), experts.calls


def decorated(context, problem):
    mesh = whole_mesh("torch", context.world_size, 2, 2)["ep", "tp"]
    asked = []

    def current_mesh():
        asked.append(1)
        return mesh

    @hp.parallelize(hp.ExpertTensorParallel(), current_mesh)
    class Experts(hp.GroupedExperts):
        """Decorated."""

    class Below(Experts):
        pass

    experts = Experts(6, 8, 4)
    return len(asked), tuple(experts.w1.to_local().shape), isinstance(experts, Experts), tuple(Below(6, 8, 4).w1.shape)


def optimizer_and_clipping(context, problem):
    """AdamW and gradient clipping on the sharded experts, against one device."""
    ep_rank, _ = coordinates(context, 2, 2)
    experts, one = sharded(context, 2, 2, problem), make_experts(context, problem)
    found = []
    for module, ranks in ((experts, [ep_rank]), (one, [0, 1])):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                y = module(torch.tensor(problem.x[rank]), torch.tensor(problem.counts[rank]))
                (y + torch.tensor(problem.targets[rank])).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            optimizer.step()
        found.append(
            (
                norm.item(),
                [
                    context.framework.array(
                        getattr(module, n).full_tensor() if module is experts else getattr(module, n)
                    )
                    for n in ("w1", "w2", "w3")
                ],
            )
        )
    return found
