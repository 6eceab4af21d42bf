"""One plan in full: the formulas with its numbers in them, and the code to write."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hyper_parallel.plan.clock import experts_seconds
from hyper_parallel.plan.layer import collectives, flops, kept_bytes
from hyper_parallel.plan.memory import MIB, OPTIMIZERS
from hyper_parallel.plan.report import bytes_text, seconds_text
from hyper_parallel.plan.search import Plan, Request, layer_for

__all__ = ["explain", "find_plan"]

AXES_OF = {"ExpertParallel": ("ep",), "TensorParallel": ("tp",)}


def find_plan(plans: Sequence[Plan], wanted: str) -> Plan:
    """The best plan of that name: "ep4tp2", also with dp ("dp2ep4tp2"), a style's short name and a recompute behind it
    ("ep4tp2 split full"). Short names: ep, tp, etp, split, dedup.

    Raises:
        ValueError: no such plan among ``plans``; the message shows those there are.
    """
    mesh, *words = wanted.replace(",", " ").split() or [""]
    sizes = {axis: int(n) for axis, n in re.findall(r"(dp|ep|tp)(\d+)", mesh)}
    if not sizes or re.sub(r"(dp|ep|tp)\d+", "", mesh):
        raise ValueError(f'a plan is named like "ep4tp2" or "ep4tp2 split full", got {wanted!r}')
    for one in plans:
        fits = all(getattr(one, axis) == n for axis, n in sizes.items())
        if fits and all(word in (short_name(one.style), one.style, one.recompute) for word in words):
            return one
    meshes = sorted({f"ep{one.ep}tp{one.tp}" for one in plans})
    shown = ", ".join(meshes[:20]) + (" ..." if len(meshes) > 20 else "")
    raise ValueError(f"no plan {wanted!r}; the meshes are {shown}")


def short_name(style: str) -> str:
    """ "etp" for "ExpertTensorParallel", and so on."""
    return {"ExpertParallel": "ep", "TensorParallel": "tp", "ExpertTensorParallel": "etp"}.get(
        style, style.removesuffix("ExpertTensorParallel").lower()
    )


def explain(request: Request, one: Plan) -> str:
    """Formulas with numbers filled in, and the code of the plan."""
    parts = (_sizes(request, one), _memory(request, one), _layer(request, one), _time(request, one), code(request, one))
    return "\n\n".join(parts)


def _sizes(request: Request, one: Plan) -> str:
    model, layer = request.model, layer_for(request, one.ep, one.tp, one.style)
    lines = [
        f"{one.name}: {one.dp} x {one.ep} x {one.tp} = {request.ranks} ranks",
        f"T = tokens / (dp ep) = {request.tokens} / ({one.dp} x {one.ep}) = {layer.num_tokens} tokens of a coordinate",
        f"R = T K = {layer.num_tokens} x {model.top_k} = {layer.rows} rows; E/ep = {model.num_experts // one.ep} "
        f"experts of hidden size H/tp = {model.hidden_dim // one.tp} on a rank; D = {model.dim}, b = {layer.itemsize}",
    ]
    if one.sequence_parallel:
        lines.append(
            f"S = T/tp = {layer.own_tokens} tokens that a rank holds between layers; attention is counted as if "
            "every tp rank computed it for all T, without the exchanges of whatever cuts it"
        )
    if one.imbalance.time > 1:
        lines.append(
            f"busiest rank: {one.imbalance.time:.2f} times the mean's rows in time, {one.imbalance.memory:.2f} kept"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in (*one.notes, *model.notes))])


def _memory(request: Request, one: Plan) -> str:
    model, memory, b = request.model, one.memory, layer_for(request, one.ep, one.tp, one.style).itemsize
    optimizer = OPTIMIZERS[request.optimizer]
    experts = model.expert_parameters(one.ep, one.tp)
    rest = model.dense_parameters() + model.shared_parameters(one.tp)
    zero = f", ZeRO {request.zero} over {one.dp} (experts) and {one.dp * one.ep} (rest) ranks" if request.zero else ""
    return "\n".join(
        [
            "Memory of a rank",
            f"  routed experts  L (E/ep) 3 D (H/tp) = {model.num_moe_layers} x {model.num_experts // one.ep} x 3 x "
            f"{model.dim} x {model.hidden_dim // one.tp} = {experts:,} parameters",
            f"  everything else, whole on every rank but for shared experts: {rest:,} parameters",
            f"  parameters   x {b} bytes = {bytes_text(memory.parameters)}{zero}",
            f"  gradients    x {optimizer.gradient_bytes(b)} bytes = {bytes_text(memory.gradients)}",
            f"  optimizer    x {optimizer.state_bytes(b)} bytes ({request.optimizer}) = {bytes_text(memory.optimizer)}",
            f"  activations  recompute {one.recompute} = {bytes_text(memory.activations)}",
            f"  buffers      {bytes_text(memory.buffers)}",
            f"  total        {bytes_text(memory.total)} of {bytes_text(request.cluster.memory_bytes)}: "
            + ("fits" if one.fits else "does not fit"),
        ]
    )


def _layer(request: Request, one: Plan) -> str:
    layer = layer_for(request, one.ep, one.tp, one.style, one.imbalance.time)
    forward, backward = flops(layer)
    lines = [
        f"One of {request.model.num_moe_layers} MoE layers",
        f"  flops of the experts  6 T K D H / tp = {forward:.3e} forward, {backward:.3e} backward",
        f"  kept for backward     {bytes_text(kept_bytes(layer))}",
    ]
    for one_call in collectives(layer):
        lines.append(
            f"  {one_call.when:8} {one_call.axis} {one_call.kind:14} {one_call.what:6} {one_call.formula} = "
            f"{one_call.payload:,} bytes"
        )
    return "\n".join(lines)


def _time(request: Request, one: Plan) -> str:
    layer = layer_for(request, one.ep, one.tp, one.style, one.imbalance.time)
    cluster, time = request.cluster, one.time
    of_layer = experts_seconds(layer, cluster, request.dtype)
    speed = cluster.compute[request.dtype] * cluster.efficiency
    bound = "flops" if of_layer["forward"] <= flops(layer)[0] / speed * (1 + 1e-9) else "memory"
    leaving = {
        axis: f"{bytes_text(of['inside'])} inside hosts, {bytes_text(of['between'])} between"
        for axis, of in one.traffic.items()
    }
    height = layer.arriving_rows * one.ep // layer.num_experts
    reasons = {
        "experts": f"bound by {bound}: a product is [{height}, D] x [D, H/tp]",
        "elementwise": "passes over memory between products and links",
        "dense": "attention, router, shared and dense layers, output; the same on every tp rank",
        **leaving,
    }
    lines = ["Time of a step"]
    lines += [f"  {part:12} {seconds_text(getattr(time, part)):>9}  {why}" for part, why in reasons.items()]
    return "\n".join(
        [*lines, f"  total        {seconds_text(time.total):>9}  of it exposed links {seconds_text(time.exposed)}"]
    )


def code(request: Request, one: Plan) -> str:
    """Mesh, plan and environment."""
    model = request.model
    lines = [
        "# Every rank:",
        f'mesh = init_device_mesh(device_type, ({one.dp}, {one.ep}, {one.tp}), mesh_dim_names=("dp", "ep", "tp"))',
    ]
    if request.cluster.buffer_bytes:
        largest = max(one.buffer_sizes.values(), default=0) // MIB
        lines.insert(0, f"# Environment: HCCL_BUFFSIZE={max(largest, request.cluster.buffer_bytes // MIB)}")
    axes = AXES_OF.get(one.style, ("ep", "tp"))
    sliced = ", ".join(f'"{axis}"' for axis in axes)
    lines.append(f'parallelize_module(model, mesh[{sliced}], {{"layers.*.moe.experts": {one.style}()}})')
    if one.sequence_parallel:
        lines.append('parallelize_module(model, mesh["tp"], {"layers.*.moe": MoESequenceParallel()})')
    if model.shared_hidden_dim and one.tp > 1:
        lines.append('parallelize_module(model, mesh["tp"], {"layers.*.moe.shared_experts": TensorParallel()})')
    if one.recomputes:
        what = "every MoE layer" if one.recompute == "moe" else "every layer"
        lines.append(f"# Recompute {what}, for example by torch.utils.checkpoint or MindSpore's recompute.")
    if one.sequence_parallel:
        lines += [
            '# After backward: reduce_gradients over mesh["dp", "ep", "tp"] for what sees 1/tp of the tokens: norms,',
            '# embedding, output; over mesh["dp", "ep"] for MoE layers, for attention that every tp rank computes for',
            "# all tokens, and for norms under torch's SequenceParallel, DTensors that sum over tp themselves.",
        ]
    elif one.dp * one.ep > 1:
        lines.append("# After backward: sum experts' gradients over dp, all others over dp and ep; none over tp.")
    return "Code\n" + "\n".join(f"  {line}" for line in lines)
