"""A MoE layer of a real model's size on the virtual clock, for the planner's times."""

from unittest import mock

import torch
import torch.distributed.tensor as dt

import hyper_parallel as hp
from tests.harness.setting import mesh_for
from tests.npu_sim.hollow import arithmetic_up_to
from tests.npu_sim.timeline import Timeline

COMPUTED = 2**16  # elements; nothing is computed with larger tensors
PASSES = ("forward", "backward")


def layer_seconds(context, style, ep, tp, num_tokens, dim, hidden_dim, num_experts, top_k):
    """Virtual seconds of one pass each way of a layer that ran before: {"forward": (all, exposed), "backward": ...}."""
    with arithmetic_up_to(COMPUTED):
        with torch.device("meta"):  # no rank ever holds, or sends, whole experts
            experts = hp.GroupedExperts(dim, hidden_dim, num_experts).to(torch.bfloat16)
        with torch.device("npu"):
            layer = hp.MoE(dim, 1, num_experts, top_k).to(torch.bfloat16)
            x = torch.empty(num_tokens, dim, dtype=torch.bfloat16).requires_grad_()
            routing = _even_routing(num_tokens, num_experts, top_k)
        style = getattr(hp, style)()
        with mock.patch.object(dt, "distribute_tensor", _shard_of_nothing):
            layer.experts = style.apply(experts, mesh_for(context, style, ep, tp))
        # The router would choose by numbers that were never computed; its own work stays.
        route, gradient = layer.router.forward, torch.empty_like(x)
        layer.router.forward = lambda x, bias: (route(x, bias)[0], routing)
        layer(x).backward(gradient)
        layer.zero_grad()  # else gradients would be added to those of the first pass
        timeline = Timeline()
        timeline.watch("moe", layer)
        layer(x).backward(gradient)
        torch.npu.synchronize()
    report = timeline.report()
    phases = {when: report[f"moe {when}"] for when in PASSES}
    return {when: (phase.time_ns / 1e9, phase.exposed_ns / 1e9) for when, phase in phases.items()}


def _even_routing(num_tokens, num_experts, top_k):
    """Experts [T, K] so that each is chosen equally often: token t's are E / K apart, from t on."""
    first = torch.arange(num_tokens).reshape(-1, 1)
    return (first + torch.arange(top_k) * (num_experts // top_k)) % num_experts


def _shard_of_nothing(whole, mesh, placements):
    """This rank's part of a tensor on meta, on the device."""
    shape = list(whole.shape)
    for axis, placement in enumerate(placements):
        shape[placement.dim] //= mesh.size(axis)
    part = torch.empty(shape, dtype=whole.dtype, device="npu")
    return dt.DTensor.from_local(part, mesh, placements, run_check=False)
