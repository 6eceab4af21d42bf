"""Cases for blocks with a MoE layer under torch.compile."""

import copy
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hyper_parallel as hp
from tests.harness.oracle import relative_error
from tests.harness.setting import get_platform_class, mesh_for

DIM = 8
SIZES = {"ExpertParallel": (4, 1), "TensorParallel": (1, 4)}  # of ep and tp; (2, 2) for the others


class Block(torch.nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(DIM), torch.nn.Linear(DIM, DIM)
        self.moe = hp.MoE(DIM, 12, 4, 2, num_shared_experts=1, shared_gate=True, **arguments)

    def forward(self, x):
        return x + self.moe(self.norm(torch.tanh(self.linear(x))))


def make_blocks(context, style, num_kinds, **arguments):
    """Two blocks, the second or (if of one kind) both with a sharded shared expert; and this rank's ep coordinate."""
    hp.set_platform("torch")
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(Block(**arguments), Block(**arguments)).double()
    ep, tp = SIZES.get(style, (2, 2))
    mesh = mesh_for(context, hp.ExpertTensorParallel(), ep, tp)
    style = getattr(hp, style)()
    for block in blocks:
        style.apply(block.moe.experts, mesh[style.mesh_dim_names])
    for block in blocks[num_kinds - 1 :]:
        hp.TensorParallel().apply(block.moe.shared_experts, mesh["tp"])
    return blocks, mesh.get_local_rank("ep")


def wrapped(block, wrapping, **arguments):
    if wrapping == "compile(checkpoint)":
        block = checkpoint_wrapper(block)
    block.compile(**arguments)
    return checkpoint_wrapper(block) if wrapping == "checkpoint(compile)" else block


def evaluate(blocks, x):
    """Output, all gradients, and counters after a step."""
    x = x.clone().requires_grad_()
    blocks.zero_grad()
    y = blocks(x)
    (y * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in blocks.parameters()]
    loads = [buffer.tolist() for name, buffer in blocks.named_buffers() if name.endswith("tokens_per_expert")]
    return [value.detach().numpy() for value in (y, x.grad, *gradients)], loads


def compiled(context, style, backend, wrapping, token_counts, num_kinds=2, fullgraph=True, hook=False, arguments=None):
    """Blocks compiled and not, over some numbers of tokens.

    Returns the largest relative error of output and gradients; the number of graphs after each step; whether the
    counters agreed; and how often the experts of the compiled blocks were reached in the last step.
    """
    blocks, ep_rank = make_blocks(context, style, num_kinds, **(arguments or {}))
    torch.compiler.reset()
    counter, fast = CompileCounterWithBackend(backend), copy.deepcopy(blocks)
    if hook:
        for block in fast:
            block.moe.experts.register_forward_pre_hook(lambda *_: None)
    for i, block in enumerate(fast):
        fast[i] = wrapped(block, wrapping, backend=counter, fullgraph=fullgraph)
    errors, graphs, same_loads = [], [], []
    for step, num_tokens in enumerate(token_counts):
        torch.manual_seed(1000 * step + ep_rank)
        x = torch.randn(num_tokens + 2 * ep_rank, DIM, dtype=torch.float64)
        (expected, loads), calls = evaluate(blocks, x), mock.Mock()
        with counting("count_in_backward", calls):
            found, fast_loads = evaluate(fast, x)
        errors += [relative_error(*pair) for pair in zip(found, expected, strict=True)]
        graphs.append(counter.frame_count)
        same_loads.append(loads == fast_loads and sum(map(sum, loads)) > 0)
    torch.compiler.reset()
    return max(errors), graphs, all(same_loads), calls.call_count


def counting(verb, mocked):
    """Count the calls of a platform's verb."""
    platform = get_platform_class("torch")
    original = getattr(platform, verb)

    def call(self, *args):
        mocked()
        return original(self, *args)

    return mock.patch.object(platform, verb, call)
