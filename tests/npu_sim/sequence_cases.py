"""What one MoE layer asks of the device, on every simulated rank."""

import torch

import hyper_parallel as hp
from tests.harness.setting import mesh_for
from tests.npu_sim import aicpu
from tests.npu_sim.launches import host_waits

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
