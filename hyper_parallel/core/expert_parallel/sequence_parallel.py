"""The style of a MoE layer whose tokens are cut over tp."""

from typing import Any

from hyper_parallel.core.device_mesh import check_axis_names, check_mesh
from hyper_parallel.core.expert_parallel.modules import MoEBase
from hyper_parallel.core.expert_parallel.tokens import TokenLayout
from hyper_parallel.core.parallel_style import ParallelStyle
from hyper_parallel.core.placement_types import Placement, Shard, placement_from
from hyper_parallel.core.types import Mesh, Module, SameModule
from hyper_parallel.platform import get_platform

__all__ = ["MoESequenceParallel"]


SEQUENCE = Shard(1)  # of [B, S, D]


class MoESequenceParallel(ParallelStyle):
    """A MoE layer takes its tokens cut over tp and returns them so, on a 1-D mesh ``("tp",)``.

    It stands on the layer, beside the styles of its experts: ``{"moe": MoESequenceParallel(), "moe.experts":
    ExpertTensorParallel()}``. The layer gathers the tokens, and hands out the sum of its output: an all-gather and a
    reduce-scatter over tp in place of an all-reduce, and backward the same two the other way round. Any number of
    tokens on each rank will do. Outputs and gradients are those of one device; those of the router, and of a shared
    expert that is not cut, are complete on every tp rank.

    Args:
        input_layouts: how the layer's input lies over tp, ``Shard(dim)`` or ``Replicate()``, ours or torch's; also in a
            tuple of one, as torch's styles take it. ``Shard(1)`` is the sequence of [B, S, D]; tokens [T, D] want
            ``Shard(0)``. On torch the input may be a DTensor, which is brought to this layout.
        output_layouts: the same of its output; by default that of the input.
        use_local_output: torch: return the local tensor, or a DTensor.
        tp_axis: the name of the mesh's axis.

    Raises:
        TypeError: a layout that is no placement. ValueError: layouts that a layer cannot have.
    """

    mesh_dim_names: tuple[str, ...] = ("tp",)

    def __init__(
        self,
        *,
        input_layouts: Any = SEQUENCE,
        output_layouts: Any = None,
        use_local_output: bool = True,
        tp_axis: str = "tp",
    ) -> None:
        super().__init__()
        given = _one_placement(input_layouts, "input_layouts")
        wanted = given if output_layouts is None else _one_placement(output_layouts, "output_layouts")
        cut = {placement for placement in (given, wanted) if placement.is_shard()}
        if len(cut) != 1 or given.is_partial() or wanted.is_partial():
            raise ValueError(
                "MoESequenceParallel expects Shard(dim) for the layer's input, its output, or both, of one dim, and "
                f"Replicate() for the other, got input_layouts {given} and output_layouts {wanted}"
            )
        self.given, self.wanted, self.use_local_output = given, wanted, use_local_output
        check_axis_names(type(self).__name__, tp_axis=tp_axis)
        self.mesh_dim_names = (tp_axis,)

    def validate(self, module: Module, device_mesh: Mesh) -> None:
        platform, style = get_platform(module), type(self).__name__
        if not isinstance(module, MoEBase):
            raise TypeError(f"{style} expects a MoE layer of hyper_parallel, got {type(module).__qualname__}")
        if not platform.is_mesh(device_mesh):
            raise TypeError(
                f"{style}: a {platform.name} module needs a {platform.name} mesh from init_device_mesh, "
                f"got {type(device_mesh).__module__}.{type(device_mesh).__qualname__}"
            )
        check_mesh(device_mesh, self.mesh_dim_names, style)
        if module.token_layout is not None:
            raise RuntimeError(f"{style}: this layer has the style already; apply it once")
        if not self.use_local_output and platform.name != "torch":
            raise ValueError(f"{style}: {platform.name} has no DTensor: leave use_local_output at True")

    def apply(self, module: SameModule, device_mesh: Mesh) -> SameModule:
        """Have the layer take and return its tokens in these layouts. Before or after the experts' style.

        Every rank of the mesh calls this. After an error the layer is as it was.

        Args:
            module: a ``MoE``.
            device_mesh: the axis over which the tokens are cut; where experts, or a shared expert, are cut over tp, the
                same ranks.

        Returns:
            ``module``.

        Raises:
            TypeError: not a ``MoE``, or a mesh of another framework. ValueError: mesh names.
            RuntimeError: a second ``apply``.
        """
        self.validate(module, device_mesh)
        layout = TokenLayout(get_platform(module), device_mesh, self.given, self.wanted, self.use_local_output)
        module.token_layout = layout  # type: ignore[attr-defined]
        return module


def _one_placement(value: Any, name: str) -> Placement:
    values = value if isinstance(value, tuple | list) else (value,)
    if len(values) != 1:
        raise ValueError(
            f"{name} of a MoE layer, which has one input and one output, must be one placement, got {value!r}"
        )
    return placement_from(values[0])
