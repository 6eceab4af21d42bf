"""The mesh contract, and rank arithmetic.

On torch ``init_device_mesh`` returns torch's own ``DeviceMesh``. A platform without a mesh of its own subclasses the
``DeviceMesh`` below and says how a process group is made. Both behave alike in everything documented here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.types import Group, Mesh

__all__ = ["DeviceMesh", "axis_name", "check_axis_names", "check_mesh", "init_device_mesh"]


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> Mesh:
    """Arrange all ranks in a mesh, row by row: rank = coordinate of the last axis first.

    Every rank calls this with the same arguments; it makes the process groups of every axis.

    Args:
        device_type: "cpu", "npu" or "cuda", as the framework names its devices.
        mesh_shape: sizes of the axes, for example ``(ep, tp)``.
        mesh_dim_names: names of the axes, for example ``("ep", "tp")``.

    Returns:
        A mesh with ``mesh["ep"]``, ``mesh["ep", "tp"]``, ``ndim``, ``shape``, ``mesh_dim_names``, ``size(dim=None)``,
        ``get_group(dim=None)``, ``get_local_rank(dim=None)`` and ``get_coordinate()``. An axis is given by name or
        index. On torch it is a ``torch.distributed.device_mesh.DeviceMesh``.

    Raises:
        TypeError: sizes that are no integers, or no sequence.
        ValueError: the sizes do not multiply to the number of ranks, or names and sizes differ in number.
        RuntimeError: the framework's communication is not initialised.
    """
    from hyper_parallel.platform import get_platform

    if not isinstance(mesh_shape, Sequence):
        raise TypeError(f"mesh_shape must be a sequence of sizes such as (2, 4), got {mesh_shape!r}")
    if any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in mesh_shape):
        raise TypeError(f"mesh_shape must hold integers, got {tuple(mesh_shape)}")
    if isinstance(mesh_dim_names, str):
        raise TypeError(f"mesh_dim_names must be a sequence of names such as ('ep', 'tp'), got {mesh_dim_names!r}")
    shape = tuple(int(size) for size in mesh_shape)
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape must hold sizes of at least 1, got {shape}")
    if names is not None and len(names) != len(shape):
        raise ValueError(f"mesh_dim_names {names} must name each axis of mesh_shape {shape}")
    if names is not None and len(set(names)) != len(names):
        raise ValueError(f"mesh_dim_names must differ from each other, got {names}")
    platform = get_platform()
    world_size = platform.world_size(device_type)
    if int(np.prod(shape)) != world_size:
        raise ValueError(f"mesh_shape {shape} needs {int(np.prod(shape))} ranks, but {world_size} are running")
    return platform.init_device_mesh(device_type, shape, names)


class DeviceMesh:
    """An n-dimensional array of ranks as seen from one rank, with a process group per axis.

    Subclasses implement ``_make_group``. Groups are made once, by the whole mesh; slices share them.

    Args:
        device_type: kind of device, kept for the user.
        ranks: global ranks, an integer array of the mesh's shape.
        mesh_dim_names: one name per axis, or None.
        rank: the global rank of this process.
    """

    def __init__(
        self, device_type: str, ranks: npt.ArrayLike, mesh_dim_names: tuple[str, ...] | None, rank: int
    ) -> None:
        self.device_type = device_type
        self.mesh = np.asarray(ranks, dtype=np.int64)
        self.mesh_dim_names = mesh_dim_names
        where = np.argwhere(self.mesh == rank)
        self._coordinate = None if len(where) == 0 else tuple(int(c) for c in where[0])
        axes = () if self._coordinate is None else range(self.ndim)
        self._groups = tuple(self._make_group(self.axis_ranks(axis)) for axis in axes)

    def _make_group(self, ranks: list[int]) -> Group:
        """Return the process group of ``ranks`` (ascending global ranks that include this one)."""
        raise NotImplementedError

    def axis_ranks(self, axis: int) -> list[int]:
        """Global ranks that share this rank's coordinate on every axis but ``axis``, in order of that axis."""
        index = tuple(slice(None) if other == axis else c for other, c in enumerate(self._here()))
        return [int(rank) for rank in self.mesh[index]]

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks of one axis, or of the whole mesh."""
        return int(self.mesh.size) if mesh_dim is None else self.shape[self._axis(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> Group:
        """Process group of one axis; the axis may be left out where there is only one."""
        self._here()
        return self._groups[self._only_axis(mesh_dim, "get_group")]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Coordinate of this rank on one axis; the axis may be left out where there is only one."""
        return self._here()[self._only_axis(mesh_dim, "get_local_rank")]

    def get_coordinate(self) -> list[int] | None:
        """Coordinates of this rank, one per axis, or None if it is not part of the mesh."""
        return None if self._coordinate is None else list(self._coordinate)

    def __getitem__(self, names: str | tuple[str, ...]) -> "DeviceMesh":
        """The sub-mesh of the named axes through this rank; axes keep the order they have in this mesh."""
        names = (names,) if isinstance(names, str) else tuple(names)
        have = self.mesh_dim_names or ()
        unknown = [name for name in names if name not in have]
        if unknown or not names:
            raise KeyError(f"mesh axes {names} are not all among this mesh's names {have}")
        axes = [have.index(name) for name in names]
        if axes != sorted(set(axes)):
            raise KeyError(f"mesh axes {names} must be given once each, in the mesh's order {have}")
        return self if names == have else self._sliced(axes, names)

    def _sliced(self, axes: list[int], names: tuple[str, ...]) -> "DeviceMesh":
        sub = object.__new__(type(self))
        sub.device_type, sub.mesh_dim_names = self.device_type, names
        here = self._here()
        sub.mesh = self.mesh[tuple(slice(None) if axis in axes else c for axis, c in enumerate(here))]
        sub._coordinate = tuple(here[axis] for axis in axes)
        sub._groups = tuple(self._groups[axis] for axis in axes)
        return sub

    def _here(self) -> tuple[int, ...]:
        """Coordinates of this rank, which is part of the mesh."""
        if self._coordinate is None:
            raise RuntimeError(f"this rank is not part of the mesh {self}")
        return self._coordinate

    def _axis(self, dim: int | str) -> int:
        if isinstance(dim, str):
            names = self.mesh_dim_names or ()
            if dim not in names:
                raise KeyError(f"mesh axis {dim!r} is not among this mesh's names {self.mesh_dim_names}")
            return names.index(dim)
        return int(dim)

    def _only_axis(self, dim: int | str | None, method: str) -> int:
        if dim is not None:
            return self._axis(dim)
        if self.ndim != 1:
            raise RuntimeError(f"{method}() needs an axis on a {self.ndim}-D mesh, one of {self.mesh_dim_names}")
        return 0

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceMesh":
        # A mesh stands for running process groups: a copied module goes on using the same ones.
        return self


def axis_name(mesh: Mesh) -> str:
    """The name of a 1-D mesh's axis, for messages."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "an unnamed axis"


def check_axis_names(style: str, **names: str) -> None:
    """Raise unless the names that a style was given for its axes, ``ep_axis="ep"``, may name axes of one mesh.

    Raises:
        TypeError: no string. ValueError: empty, or one name for two axes.
    """
    for argument, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{style}: {argument} must be the name of a mesh axis, such as 'tp', got {name!r}")
        if not name:
            raise ValueError(f"{style}: {argument} must be the name of a mesh axis, such as 'tp', got an empty string")
    if len(set(names.values())) < len(names):
        raise ValueError(f"{style}: {' and '.join(names)} must differ, both are {next(iter(names.values()))!r}")


def check_mesh(device_mesh: Mesh, names: tuple[str, ...], style: str) -> None:
    """Raise ``ValueError`` unless ``device_mesh`` has exactly the axes ``names``, in order, and holds this rank."""
    have = None if device_mesh.mesh_dim_names is None else tuple(device_mesh.mesh_dim_names)
    if have != names:
        slice_text = ", ".join(repr(name) for name in names)
        contained = have is not None and [name for name in have if name in names] == list(names)
        advice = (
            f"slice it: mesh[{slice_text}]"
            if contained
            else f"build it with init_device_mesh(..., mesh_dim_names={names}), or slice a mesh that has these axes in "
            f"this order: mesh[{slice_text}]"
        )
        raise ValueError(
            f"{style} expects a {len(names)}-D mesh with names {names}, "
            f"got a {device_mesh.ndim}-D mesh with names {have}; {advice}"
        )
    if device_mesh.get_coordinate() is None:
        raise ValueError(f"{style}: this rank is not part of the mesh {device_mesh}")
    ranks = np.asarray(device_mesh.mesh.tolist())
    if any((np.diff(ranks, axis=axis) < 0).any() for axis in range(ranks.ndim)):
        # Groups are made of ascending ranks, so that their order would not be that of the coordinates.
        raise ValueError(
            f"{style}: ranks must ascend along every axis of the mesh, got {ranks.tolist()}; shards would be put "
            "together in another order than they were cut"
        )
