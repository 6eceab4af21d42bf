"""Every legal way to lay a model over a cluster, with what it costs, the best first."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hyper_parallel.plan.clock import Time, time_of
from hyper_parallel.plan.cluster import DTYPES, Cluster
from hyper_parallel.plan.imbalance import Imbalance, imbalance_of, zipf_load
from hyper_parallel.plan.layer import STYLES, MoELayer, flops
from hyper_parallel.plan.memory import OPTIMIZERS, RECOMPUTE, Memory, hccl_buffers, memory_of
from hyper_parallel.plan.model import Model
from hyper_parallel.plan.traffic import Traffic, step_collectives, traffic_of

__all__ = ["Plan", "Request", "plan", "make_plans", "layer_for"]


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        ranks: of the whole cluster. tokens: of one step over all ranks. sequence: length of one sequence.
        dtype: of weights and activations: "bf16", "fp16" or "fp32".
        optimizer: a name in ``OPTIMIZERS``. zero: 0 to 3, see ``memory_of``.
        recompute: "none", "moe", "full", or "any" to compare all three.
        load: recorded counts [layers, E], or None. zipf: exponent of an assumed load, or None.
        sequence_parallel: tokens between layers are cut over tp, and MoE layers take them so.
    """

    model: Model
    cluster: Cluster
    ranks: int
    tokens: int
    sequence: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    recompute: str = "any"
    zero: int = 0
    load: np.ndarray | None = field(default=None, compare=False)
    zipf: float | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        known: dict[str, Collection] = {
            "dtype": DTYPES,
            "optimizer": OPTIMIZERS,
            "recompute": ("any", *RECOMPUTE),
            "zero": (0, 1, 2, 3),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(map(str, values))}, got {getattr(self, name)!r}")
        if self.dtype not in self.cluster.compute:
            raise ValueError(f"the cluster {self.cluster.name} has no compute for {self.dtype}")
        if self.load is not None and self.zipf is not None:
            raise ValueError("give a recorded load or a Zipf exponent, not both")
        if self.load is not None and self.load.shape[-1] != self.model.num_experts:
            raise ValueError(f"load has {self.load.shape[-1]} experts, the model {self.model.num_experts}")


@dataclass(frozen=True)
class Plan:
    """One way to lay the model out, and its cost on the slowest rank and one step.

    Attributes:
        memory: bytes. traffic: bytes by axis, see ``traffic_of``. time: seconds. flops: of the routed experts.
        buffer_sizes: bytes of the communication buffer that each axis' group wants.
        imbalance: rows at the busiest rank relative to the mean.
        notes: what must be true beside this for the plan to work, or what is not counted.
        sequence_parallel: whether tokens between layers are cut over tp.
    """

    dp: int
    ep: int
    tp: int
    style: str
    recompute: str
    fits: bool
    memory: Memory
    traffic: Traffic
    time: Time
    flops: int
    buffer_sizes: dict[str, int]
    imbalance: Imbalance
    notes: tuple[str, ...] = ()
    sequence_parallel: bool = False

    @property
    def name(self) -> str:
        more = " sequence parallel" * self.sequence_parallel + f" recompute {self.recompute}" * self.recomputes
        return f"dp{self.dp} ep{self.ep} tp{self.tp} {self.style}{more}"

    @property
    def recomputes(self) -> bool:
        return self.recompute != "none"

    @property
    def is_plain(self) -> bool:
        """Whether no simpler style does the same on this mesh."""
        wants = {"ExpertParallel": self.tp == 1, "TensorParallel": self.ep == 1 and self.tp > 1}
        if self.style in wants:
            return wants[self.style]
        least = {"ExpertTensorParallel": (2, 2), "DedupExpertTensorParallel": (2, 1)}.get(self.style, (1, 2))
        return self.ep >= least[0] and self.tp >= least[1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        times = {**asdict(self.time), "exposed": self.time.exposed, "total": self.time.total}
        return {
            **{name: getattr(self, name) for name in ("dp", "ep", "tp", "style", "recompute", "fits")},
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "traffic": self.traffic,
            "time": times,
            "flops": self.flops,
            "buffer_sizes": self.buffer_sizes,
            "imbalance": asdict(self.imbalance),
            "notes": list(self.notes),
            "sequence_parallel": self.sequence_parallel,
        }


def make_plans(request: Request) -> list[Plan]:
    """All legal plans: those that fit first, the fastest before others; then the rest, the smallest before others.

    Legal is what the styles accept: ep divides the ranks and the experts, tp the ranks and the hidden size of experts
    and shared experts, and every (dp, ep) coordinate gets the same whole number of tokens.
    """
    busiest: dict[int, Imbalance] = {}
    recomputes = RECOMPUTE if request.recompute == "any" else (request.recompute,)
    found = [
        plan(request, ep, tp, style, recompute, busiest)
        for ep, tp in _meshes(request)
        for style in _styles(ep, tp)
        for recompute in recomputes
    ]
    simplicity = {style: i for i, style in enumerate(STYLES)}

    def order(one: Plan) -> tuple:
        costs = (one.time.total, one.memory.total) if one.fits else (one.memory.total, one.time.total)
        return not one.fits, bool(one.notes), *costs, not one.is_plain, simplicity[one.style]

    return sorted(found, key=order)


def _meshes(request: Request) -> Iterator[tuple[int, int]]:
    model, ranks = request.model, request.ranks
    for ep in _divisors(model.num_experts):
        if ranks % ep:
            continue
        for tp in _divisors(ranks // ep):
            if model.hidden_dim % tp or model.shared_hidden_dim % tp or request.tokens % (ranks // tp):
                continue
            yield ep, tp


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _styles(ep: int, tp: int) -> Iterator[str]:
    for style in STYLES:
        if not ((style == "ExpertParallel" and tp > 1) or (style == "TensorParallel" and ep > 1)):
            yield style


def layer_for(request: Request, ep: int, tp: int, style: str, arriving: float = 1.0) -> MoELayer:
    """One MoE layer of the model on this mesh."""
    model = request.model
    return MoELayer(
        style=style,
        ep=ep,
        tp=tp,
        num_tokens=request.tokens // (request.ranks // tp),
        num_experts=model.num_experts,
        top_k=model.top_k,
        dim=model.dim,
        hidden_dim=model.hidden_dim,
        itemsize=DTYPES[request.dtype],
        shared_hidden_dim=model.shared_hidden_dim,
        arriving=arriving,
        sequence_parallel=request.sequence_parallel,
    )


def plan(
    request: Request, ep: int, tp: int, style: str, recompute: str, busiest: dict[int, Imbalance] | None = None
) -> Plan:
    """The cost of one layout; dp is what the ranks leave.

    Args:
        busiest: imbalance by ep, kept from call to call.
    """
    dp = request.ranks // (ep * tp)
    busiest = {} if busiest is None else busiest
    if ep not in busiest:
        busiest[ep] = _imbalance(request, ep)
    layer = layer_for(request, ep, tp, style, busiest[ep].time)
    keeping = replace(layer, arriving=busiest[ep].memory)
    model, cluster, optimizer = request.model, request.cluster, OPTIMIZERS[request.optimizer]
    found = step_collectives(model, layer, dp, recompute, optimizer, request.zero)
    memory = memory_of(model, keeping, cluster, dp, recompute, optimizer, request.zero)
    forward, backward = flops(layer)
    buffers = hccl_buffers(keeping, cluster, dp)
    return Plan(
        dp=dp,
        ep=ep,
        tp=tp,
        style=style,
        recompute=recompute,
        fits=memory.total <= cluster.memory_bytes,
        memory=memory,
        traffic=traffic_of(found, layer, dp, cluster),
        time=time_of(model, layer, found, cluster, request.dtype, request.sequence, recompute),
        flops=model.num_moe_layers * (forward * (1 + (recompute != "none")) + backward),
        buffer_sizes={axis: size for axis, size in buffers.items() if axis != "all"},
        imbalance=busiest[ep],
        notes=_notes(request, layer),
        sequence_parallel=layer.cuts_tokens,
    )


def _imbalance(request: Request, ep: int) -> Imbalance:
    if request.load is not None:
        return imbalance_of(request.load, ep)
    if request.zipf is None:
        return Imbalance()
    model = request.model
    return imbalance_of(zipf_load(request.zipf, model.num_experts, model.top_k), ep, one_placement=False)


def _notes(request: Request, layer: MoELayer) -> tuple[str, ...]:
    if layer.num_tokens % request.sequence:
        return (
            f"a (dp, ep) coordinate has {layer.num_tokens} tokens, no whole sequences of {request.sequence}: attention "
            "must run over several ranks, which this library does not do",
        )
    return ()
