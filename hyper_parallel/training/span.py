"""Which ranks of a mesh hold the same part of a parameter.

All of it follows from placements and ranks, never from names of axes or kinds of modules.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.expert_parallel.tokens import COMPLETE_OVER
from hyper_parallel.core.types import Group, Mesh, Tensor
from hyper_parallel.platform import imported_platforms
from hyper_parallel.platform.gradients import GradientVerbs
from hyper_parallel.platform.platform import Platform

__all__ = ["Span", "listed", "platform_of", "sharded_groups"]


def listed(parameters: Any) -> list[Tensor]:
    """Parameters as a list: of an iterable, or one alone."""
    return [parameters] if hasattr(parameters, "requires_grad") else list(parameters)


def platform_of(parameters: Sequence[Tensor], mesh: Mesh | None = None) -> Platform:
    """The platform that parameters, or where there are none the mesh, belong to."""
    for obj in itertools.chain(parameters[:1], () if mesh is None else (mesh,)):
        for platform in imported_platforms():
            if platform.owns(obj) or platform.is_sharded(obj):
                return platform
        raise TypeError(
            f"expected parameters of torch or MindSpore, got {type(obj).__module__}.{type(obj).__qualname__}"
        )
    raise ValueError("no parameters were given; an iterator may have been used up: give a list")


def sharded_groups(verbs: GradientVerbs, parameter: Tensor) -> dict[tuple[int, ...], Group]:
    """Groups over which a parameter is cut, by their ranks: one per axis of its mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return {}
    cut = (axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
    groups = (mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1)
    return {verbs.ranks(group): group for group in groups}


@dataclass(frozen=True)
class Span:
    """A mesh as seen from this rank: the axes along which there is another rank.

    Attributes:
        ranks: global ranks, an array of the mesh's shape. place: coordinates of this rank.
    """

    verbs: GradientVerbs
    mesh: Mesh
    ranks: np.ndarray
    place: tuple[int, ...]
    _groups: dict = field(default_factory=dict)

    @staticmethod
    def of(platform: Platform, mesh: Mesh) -> "Span":
        if not platform.is_mesh(mesh):
            raise TypeError(
                f"expected a device mesh of {platform.name} whose axes see different tokens, such as "
                f'mesh["dp", "ep"], got {type(mesh).__module__}.{type(mesh).__qualname__}'
            )
        place = mesh.get_coordinate()
        if place is None:
            raise ValueError(f"this rank is not part of the mesh {mesh}")
        return Span(platform.gradients(), mesh, _ranks_of(mesh), tuple(place))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which there is more than this rank."""
        return tuple(axis for axis, size in enumerate(self.ranks.shape) if size > 1)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    def along(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Ranks that differ from this one on these axes at most, row by row."""
        index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(self.place))
        return tuple(int(rank) for rank in self.ranks[index].ravel())

    def group(self, axes: tuple[int, ...]) -> Group:
        """The group of ``along(axes)``: that of the mesh, or a joint one of several axes."""
        if axes not in self._groups:
            joint = len(axes) > 1
            group = self.verbs.joint_group(self.along(axes), self.mesh.device_type) if joint else None
            self._groups[axes] = group if joint else self.mesh.get_group(axes[0])
        return self._groups[axes]

    def shared_axes(self, parameter: Tensor) -> tuple[int, ...]:
        """The axes along which all ranks hold the same part of the parameter.

        Raises:
            ValueError: along one axis some hold the same part and some another.
        """
        shared = []
        for axis in self.axes:
            others = [rank for rank in self.along((axis,)) if rank != self.ranks[self.place]]
            same = [_holds_same_part(parameter, rank) for rank in others]
            if all(same):
                shared.append(axis)
            elif any(same):
                raise ValueError(
                    f"axis {_name(self.mesh, axis)} of the mesh joins ranks that hold the same part of a parameter of "
                    f"shape {tuple(parameter.shape)} and ranks that hold other parts; give a mesh with an axis for "
                    'each, such as mesh["dp", "ep"] in place of a flattened one'
                )
        return tuple(shared)

    def axes_to_sum(self, parameter: Tensor) -> tuple[int, ...]:
        """The shared axes, but for those whose ranks all have the parameter's complete gradient already."""
        complete = set(getattr(parameter, COMPLETE_OVER, ()))
        return tuple(axis for axis in self.shared_axes(parameter) if not complete.issuperset(self.along((axis,))))


def _holds_same_part(parameter: Any, rank: int) -> bool:
    """Whether another rank holds this rank's part. Ranks outside of the parameter's mesh have a replica of the mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return True
    found = np.argwhere(_ranks_of(mesh) == rank)
    if len(found) == 0:
        return True
    here = mesh.get_coordinate()
    cut = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return all(found[0][axis] == here[axis] for axis in cut)


def _ranks_of(mesh: Any) -> np.ndarray:
    """Global ranks of a mesh, in its shape; torch's keeps them in a tensor."""
    return np.asarray(mesh.mesh.tolist())


def _name(mesh: Any, axis: int) -> str:
    return repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
