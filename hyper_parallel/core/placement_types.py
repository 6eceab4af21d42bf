"""How a tensor lies on one mesh axis: framework-free values that compare equal to torch's own placements."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Placement", "Shard", "Replicate", "Partial", "placement_from"]


class Placement:
    """Base of the three placements."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a ``Shard``, of tensor dim ``dim`` if one is given."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)

    def __eq__(self, other: object) -> bool:
        try:
            other = placement_from(other)
        except TypeError:
            return NotImplemented
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self).__name__, *vars(self).values()))


@dataclass(frozen=True, eq=False)
class Shard(Placement):
    """Tensor dim ``dim`` is cut into equal chunks; chunk r lies on mesh coordinate r."""

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard expects the number of a tensor dim, an int, got {self.dim!r}")


@dataclass(frozen=True, eq=False)
class Replicate(Placement):
    """Every coordinate of the axis holds the whole tensor."""


@dataclass(frozen=True, eq=False)
class Partial(Placement):
    """Every coordinate holds a term; the tensor is their reduction."""

    reduce_op: str = "sum"


def placement_from(value: Any) -> Placement:
    """Return ``value`` as one of our placements.

    A placement of torch is recognised by its class name and fields, so that this needs no import of torch.

    Raises:
        TypeError: if ``value`` is not a placement that this library knows.
    """
    if isinstance(value, Placement):
        return value
    kind = type(value).__name__
    if kind == "Shard" and isinstance(getattr(value, "dim", None), int):
        return Shard(value.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial" and isinstance(getattr(value, "reduce_op", None), str):
        return Partial(value.reduce_op)
    raise TypeError(f"expected a placement (Shard, Replicate or Partial), got {value!r}")
