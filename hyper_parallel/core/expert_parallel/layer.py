"""A module that a style has parallelised: what it is called with, and what a MoE layer may do on its behalf."""

from dataclasses import dataclass
from typing import Any

__all__ = ["ParallelLayer", "InsideMoE"]


@dataclass(frozen=True)
class InsideMoE:
    """Handed to parallelised experts by the MoE layer around them, which sums over tp itself.

    Attributes:
        arriving_counts: the counts exchange that the style's ``begin`` started, or None where nothing is exchanged.
        rows_are_local: the rows are those of this rank's experts, with counts over them: no dispatch and no combine.
    """

    arriving_counts: Any = None
    rows_are_local: bool = False


@dataclass(frozen=True)
class ParallelLayer:
    """A style bound to the sizes and mesh of one module. It holds no module: a deep copy must call itself.

    Attributes:
        style: the parallel style.
        shapes: sizes of the module before sharding.
        device_mesh: the mesh it lies on.
    """

    style: Any
    shapes: Any
    device_mesh: Any

    @property
    def label(self):
        return type(self.style).__name__

    def __call__(self, mod, local_forward, *inputs, **keywords):
        return self.style._call(self, mod, local_forward, *inputs, **keywords)

    def mesh_axis(self, name):
        """The 1-D mesh of an axis, or None where the style does not use it or it has one rank."""
        if name not in self.style.mesh_dim_names:
            return None
        mesh = self.device_mesh if self.device_mesh.ndim == 1 else self.device_mesh[name]
        return mesh if mesh.size() > 1 else None
