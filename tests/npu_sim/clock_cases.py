"""Programs whose virtual time can be worked out by hand, on every simulated rank."""

import torch
import torch.distributed as dist

from tests.npu_sim import sequence_cases
from tests.npu_sim.hollow import arithmetic_up_to
from tests.npu_sim.timeline import Timeline

SIZE = 1024  # of a square product


def late_rank(context):
    """Start and end of an all-reduce to which rank 1 comes late, by a product; and the end of that product."""
    x, a = torch.ones(SIZE, device="npu"), torch.ones(SIZE, SIZE, device="npu", dtype=torch.bfloat16)
    dist.barrier()
    torch.npu.synchronize()
    timeline = Timeline()
    if context.rank == 1:
        with arithmetic_up_to(SIZE * SIZE):
            a @ a
    dist.all_reduce(x)
    torch.npu.synchronize()
    operations = {operation.name: operation for operation in timeline.operations()}
    product = operations.get("aten::matmul") or operations.get("aten::mm")
    reduce = operations["all-reduce"]
    return reduce.start, reduce.end, product and product.end


def reduce_behind_products(context, waits_first):
    """(collectives, exposed) of an all-reduce with products after it, which do or do not wait for it."""

    class Layer(torch.nn.Module):
        def forward(self, a):
            work = dist.all_reduce(torch.ones(SIZE * SIZE, device="npu"), async_op=True)
            if waits_first:
                work.wait()
            for _ in range(40):
                a = a @ a
            work.wait()
            return a

    layer, timeline = Layer(), Timeline()
    timeline.watch("layer", layer)
    a = torch.ones(SIZE, SIZE, device="npu", dtype=torch.bfloat16)
    dist.barrier()
    torch.npu.synchronize()
    with arithmetic_up_to(SIZE * SIZE):
        layer(a)
    torch.npu.synchronize()
    phase = timeline.report()["layer forward"]
    return phase.collectives_ns, phase.exposed_ns


def moe_layer(context, style, ep, tp):
    """The report of a MoE layer, and how many collectives each pass launched."""
    layer, x = sequence_cases.moe_layer(context, style, ep, tp)
    grad = torch.ones_like(x)
    layer(x).backward(grad)
    timeline = Timeline()
    timeline.watch("moe", layer)
    layer(x).backward(grad)
    torch.npu.synchronize()
    return {name: vars(phase) for name, phase in timeline.report().items()}
