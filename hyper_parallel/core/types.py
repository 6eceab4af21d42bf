"""Types in signatures of what belongs to a framework.

``core`` imports no framework, so a tensor, a module and a process group have no type that both frameworks share: their
names say to the reader what is meant, and a type checker takes anything. A mesh does: what the library asks of it is
the same on both.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

__all__ = ["Tensor", "Module", "SameModule", "Group", "Mesh"]

Tensor: TypeAlias = Any
"""``torch.Tensor`` or ``mindspore.Tensor``; parameters and torch's ``DTensor`` too."""

Module: TypeAlias = Any
"""``torch.nn.Module`` or ``mindspore.nn.Cell``."""

SameModule = TypeVar("SameModule")
"""A module that is given back."""

Group: TypeAlias = Any
"""A process group as a mesh hands it out: torch's ``ProcessGroup``, on MindSpore the group's name."""


@runtime_checkable
class Mesh(Protocol):
    """A device mesh: torch's own ``DeviceMesh``, or on MindSpore ``hyper_parallel.core.device_mesh.DeviceMesh``.

    An axis is given by name or index, and may be left out where there is only one.
    """

    @property
    def device_type(self) -> str:
        """ "cpu", "npu" or "cuda"."""

    @property
    def mesh(self) -> Any:
        """Global ranks, an integer array or tensor of the mesh's shape."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per axis, or None for a mesh without names."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks on each axis."""

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks on one axis, given by index, or of the whole mesh."""

    def get_group(self, mesh_dim: int | str | None = None) -> Group:
        """Process group of this rank on one axis."""

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Coordinate of this rank on one axis."""

    def get_coordinate(self) -> Sequence[int] | None:
        """Coordinates of this rank, one per axis, or None if it is not part of the mesh."""

    def __getitem__(self, names: str | tuple[str, ...]) -> "Mesh":
        """The sub-mesh of the named axes through this rank; axes keep the order they have in this mesh."""
