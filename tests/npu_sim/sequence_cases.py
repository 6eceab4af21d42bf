"""What one MoE layer asks of the device, on every simulated rank."""

import torch

import hyper_parallel as hp
from tests.harness.setting import mesh_for
from tests.npu_sim import aicpu
from tests.npu_sim.hollow import arithmetic_up_to
from tests.npu_sim.launches import host_waits
from tests.npu_sim.timeline import Timeline

NUM_TOKENS, DIM, HIDDEN_DIM, NUM_EXPERTS, TOP_K = 48, 32, 16, 8, 2


def calls(context, style, ep, tp, shared=False):
    """Host waits and calls on the AICPU of a layer in bfloat16, used before: {"forward": (waits, calls), ...}."""
    layer, x = moe_layer(context, style, ep, tp, shared)
    grad = torch.ones_like(x)
    layer(x).backward(grad)
    found = {}
    with counted(found, "forward"):
        y = layer(x)
    with counted(found, "backward"):
        y.backward(grad)
    return found


def moe_layer(context, style, ep, tp, shared=False):
    """A layer with its experts over the ranks, and this rank's tokens."""
    torch.manual_seed(0)
    layer = hp.MoE(DIM, HIDDEN_DIM, NUM_EXPERTS, TOP_K, num_shared_experts=int(shared)).to("npu", torch.bfloat16)
    mesh = mesh_for(context, style := getattr(hp, style)(), ep, tp)
    style.apply(layer.experts, mesh)
    torch.manual_seed(1 + mesh.get_local_rank("ep"))
    return layer, torch.randn(NUM_TOKENS, DIM).to("npu", torch.bfloat16).requires_grad_()


class counted:
    """Puts (host waits, calls on the AICPU) of a block under `name` into a dict."""

    def __init__(self, found, name):
        self._found, self._name = found, name

    def __enter__(self):
        aicpu.reset()
        self._waits = host_waits()

    def __exit__(self, *_):
        self._found[self._name] = host_waits() - self._waits, sorted(aicpu.calls)


def gather_and_exchange(context):
    """How long after the gather of the rows their exchange begins, and how long the gather takes; ns of virtual time.

    The tokens are wide, so that the gather takes long, and nothing is computed with them."""
    with arithmetic_up_to(1 << 16):
        layer = hp.MoE(1 << 13, 16, NUM_EXPERTS, TOP_K).to("npu", torch.bfloat16)
        style = hp.ExpertTensorParallel()
        style.apply(layer.experts, mesh_for(context, style, 2, 2))
        # The router would choose by numbers that were never computed.
        layer.router.forward = lambda x, _: _even_routing(len(x))
        x = torch.empty(1 << 11, 1 << 13, device="npu", dtype=torch.bfloat16)
        layer(x)
        torch.npu.synchronize()
        timeline = Timeline()
        layer(x)
        torch.npu.synchronize()
    operations = timeline.operations()
    gather = max((o for o in operations if o.name == "aten::index_select"), key=lambda o: o.end - o.start)
    rows = next(o for o in operations if o.is_collective and o.start >= gather.end)
    return rows.start - gather.end, gather.end - gather.start


def _even_routing(num_tokens):
    selected = torch.arange(num_tokens * TOP_K).reshape(num_tokens, TOP_K) % NUM_EXPERTS
    return torch.ones(num_tokens, TOP_K, device="npu"), selected.to("npu")


def planted_calls(context):
    """A sort of integers, and a copy from pageable memory: what `calls` must see."""
    found = {}
    numbers = torch.arange(8, device="npu")
    with counted(found, "integer sort"):
        numbers.sort()
    with counted(found, "float sort"):
        numbers.float().sort()
    with counted(found, "sort of one"):
        numbers[:1].float().sort()
    with counted(found, "pageable upload"):
        torch.arange(8).to("npu", non_blocking=True)
    pinned = torch.arange(8).pin_memory()
    with counted(found, "pinned upload"):
        pinned.to("npu", non_blocking=True)
    with counted(found, "read"):
        numbers.tolist()
    with counted(found, "event"):
        event = torch.npu.Event()
        event.record()
        event.synchronize()
    return found
