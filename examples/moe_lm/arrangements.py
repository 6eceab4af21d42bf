"""The arrangements of ``train_matrix.py``: how one model lies on the ranks, and how its step is made."""

from dataclasses import dataclass, replace
from functools import cache

import hyper_parallel as hp

__all__ = ["Arrangement", "Limits", "ONE_DEVICE", "arrangements"]


@dataclass(frozen=True)
class Limits:
    """What relative differences from one device in fp32 must stay below."""

    losses: float
    gradients: float
    weights: float


FP32 = Limits(losses=1e-5, gradients=1e-5, weights=1e-4)
HALF = Limits(losses=5e-3, gradients=0.3, weights=0.3)


@dataclass(frozen=True)
class Arrangement:
    """One row of the table.

    Attributes:
        dp, ep, tp: sizes of the mesh's axes. Without a style the model stays whole, on one device.
        sequence_parallel: tokens are cut over tp along the sequence, everywhere but within attention.
        fsdp: torch: FSDP2 shards the experts over dp, and the rest over dp and ep.
        accumulation: micro-batches of a step.
        half: torch: autocast to bf16; MindSpore: auto_mixed_precision O2, with fp16, as bf16 has no CPU kernels there.
    """

    title: str
    dp: int = 1
    ep: int = 1
    tp: int = 1
    style: str | None = "ExpertTensorParallel"
    shared_over_tp: bool = False
    sequence_parallel: bool = False
    fsdp: bool = False
    recompute: bool = False
    accumulation: int = 1
    half: bool = False

    @property
    def num_ranks(self):
        return self.dp * self.ep * self.tp

    @property
    def limits(self):
        return HALF if self.half else FP32

    def mesh(self):
        """The mesh of all ranks, one object for all arrangements of these sizes; None on one device."""
        return None if self.style is None else _mesh(self.dp, self.ep, self.tp)

    def plan(self):
        """Styles by the patterns of the modules that they are for."""
        plan = {"blocks.*.moe.experts": getattr(hp, self.style)()}
        if self.shared_over_tp:
            plan["blocks.*.moe.shared_experts"] = hp.TensorParallel()
        if self.sequence_parallel:
            plan["blocks.*.moe"] = hp.MoESequenceParallel()
        return plan


@cache
def _mesh(dp, ep, tp):
    return hp.init_device_mesh("cpu", (dp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))


ONE_DEVICE = Arrangement("one device", style=None)


def arrangements(platform, num_ranks):
    """Those of a platform on 1, 4 or 8 ranks; the first on one rank is what all others are measured by."""
    if num_ranks == 1:
        return [ONE_DEVICE, replace(ONE_DEVICE, title="one device, mixed precision", half=True)]
    square = Arrangement("", dp=num_ranks // 4, ep=2, tp=2, shared_over_tp=True)
    rows = [
        square,
        replace(square, title="dedup", style="DedupExpertTensorParallel"),
        replace(square, title="split", style="SplitExpertTensorParallel"),
        replace(square, title="sequence parallel", sequence_parallel=True),
        replace(square, title="recompute", recompute=True),
        replace(square, title="accumulation", accumulation=2),
        replace(square, title="mixed precision", half=True),
        replace(
            square,
            title="sequence parallel, recompute, accumulation",
            sequence_parallel=True,
            recompute=True,
            accumulation=2,
        ),
    ]
    if num_ranks == 4:
        shapes = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
        rows = [Arrangement("", *shape) for shape in shapes] + rows
    if platform == "torch":
        over_dp = replace(square, dp=2, tp=num_ranks // 4, title="FSDP2", fsdp=True)
        rows += [
            over_dp,
            replace(over_dp, title="FSDP2, recompute, accumulation", recompute=True, accumulation=2),
            replace(over_dp, title="FSDP2, mixed precision", half=True),
        ]
    return [replace(row, title=_titled(row)) for row in rows]


def _titled(row):
    axes = " x ".join(f"{axis} {size}" for axis, size in (("dp", row.dp), ("ep", row.ep), ("tp", row.tp)) if size > 1)
    return f"{axes}, {row.title}" if row.title else axes
