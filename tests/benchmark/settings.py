"""What is measured: sizes, meshes, how often."""

from dataclasses import dataclass, replace

__all__ = ["Shape", "Work", "Plan", "full_plan", "quick_plan"]

MESHES = ((2, 2), (4, 1), (1, 4))
DTYPES = ("float32", "bfloat16")
LAYERS = ("experts", "moe")


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of the batch that all ranks share."""

    num_experts: int = 16
    dim: int = 512
    hidden_dim: int = 1024
    top_k: int = 4
    num_tokens: int = 4096

    def __str__(self):
        return f"E{self.num_experts} D{self.dim} H{self.hidden_dim} K{self.top_k}, {self.num_tokens} tokens in all"


@dataclass(frozen=True)
class Work:
    """One layer in one dtype on one mesh."""

    layer: str
    dtype: str
    ep: int
    tp: int
    shape: Shape

    @property
    def tokens(self):
        """T, tokens of one ep coordinate. The whole batch is the same on every mesh, so meshes can be compared."""
        return self.shape.num_tokens // self.ep

    @property
    def itemsize(self):
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    def __str__(self):
        return f"{self.layer} {self.dtype} ({self.ep}, {self.tp})"


@dataclass(frozen=True)
class Plan:
    """All that one run measures; ``num_repetitions`` by dtype, since fp32 takes several times as long."""

    works: tuple
    num_repetitions: dict
    mindspore_shape: Shape
    num_mindspore_rounds: int
    growing_experts: tuple
    growing_tokens: tuple
    growing_ranks: tuple
    growth_shape: Shape


def full_plan():
    shape = Shape()
    works = tuple(Work(layer, dtype, *mesh, shape) for layer in LAYERS for dtype in DTYPES for mesh in MESHES)
    return Plan(
        works=works,
        num_repetitions={"float32": 6, "bfloat16": 10},
        mindspore_shape=shape,
        num_mindspore_rounds=2,
        growing_experts=(8, 16, 32, 64, 128, 256, 512),
        growing_tokens=(256, 1024, 4096, 16384),
        growing_ranks=(1, 2, 4, 8),
        growth_shape=Shape(dim=256, hidden_dim=256, num_tokens=4096),
    )


def quick_plan():
    """Small enough to test the tool itself; its numbers mean nothing."""
    shape = Shape(num_experts=8, dim=16, hidden_dim=32, top_k=2, num_tokens=64)
    plan = full_plan()
    return replace(
        plan,
        works=tuple(replace(work, shape=shape) for work in plan.works),
        num_repetitions={"float32": 3, "bfloat16": 3},
        mindspore_shape=shape,
        num_mindspore_rounds=2,
        growing_experts=(8, 16),
        growing_tokens=(32, 64),
        growing_ranks=(1, 2),
        growth_shape=shape,
    )
