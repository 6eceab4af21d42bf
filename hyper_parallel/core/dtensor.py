"""Tensors and modules laid out over a mesh."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.placement_types import Placement, Shard, placement_from
from hyper_parallel.core.types import Mesh, Module, SameModule, Tensor
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

__all__ = ["distribute_tensor", "distribute_module", "check_placements"]


def distribute_tensor(tensor: Tensor, device_mesh: Mesh, placements: Sequence[Any]) -> Any:
    """Lay ``tensor`` out over ``device_mesh``; the data of the mesh's first rank is what is laid out.

    Args:
        tensor: the same shape and dtype on every rank.
        device_mesh: a mesh of the tensor's framework.
        placements: one placement per mesh axis, in order, ours or torch's own. A sharded dim must be divisible by the
            axis (or by the product of the axes that shard it).

    Returns:
        torch: a ``DTensor``. MindSpore: a parameter that holds the local shard and answers ``placements``,
        ``device_mesh``, ``to_local()`` and ``full_tensor()``.

    Raises:
        TypeError: mixed frameworks, or something that is not a placement.
        ValueError: number of placements, ``Partial``, or a dim that is not divisible.
    """
    platform = get_platform(tensor)
    checked = check_placements(platform, tuple(tensor.shape), device_mesh, placements)
    return platform.distribute_tensor(tensor, device_mesh, checked)


def distribute_module(
    module: SameModule,
    device_mesh: Mesh,
    partition_fn: Callable[[str, Module, Mesh], None] | None = None,
    input_fn: Callable[[Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[Module, Any, Mesh], Any] | None = None,
) -> SameModule:
    """Shard a module's parameters, and optionally hook its inputs and outputs.

    Args:
        module: module whose parameters are to be laid out.
        device_mesh: a mesh of the module's framework.
        partition_fn: ``(name, submodule, device_mesh) -> None``, called once per submodule; it replaces parameters.
        input_fn: ``(module, inputs, device_mesh) -> inputs``, run before the module's forward.
        output_fn: ``(module, outputs, device_mesh) -> outputs``, run after it.

    On torch this is torch's own ``distribute_module`` and parameters left alone become replicated ``DTensor``s.
    MindSpore computes with local tensors, so there they stay as they are.
    """
    platform = get_platform(module)
    _check_same_framework(platform, device_mesh)
    return platform.distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)


def check_placements(
    platform: "Platform", shape: tuple[int, ...], device_mesh: Mesh, placements: Sequence[Any]
) -> tuple[Placement, ...]:
    """Return ``placements`` as ours after checking that they fit a tensor of ``shape``; negative dims are resolved."""
    _check_same_framework(platform, device_mesh)
    ours = tuple(placement_from(p) for p in placements)
    if len(ours) != device_mesh.ndim:
        raise ValueError(f"expected one placement per mesh axis ({device_mesh.ndim}), got {len(ours)}: {ours}")
    pieces = [1] * len(shape)
    resolved = []
    for axis, placement in enumerate(ours):
        if placement.is_partial():
            raise ValueError("a whole tensor cannot be laid out as Partial; use Shard or Replicate")
        if isinstance(placement, Shard):
            if not -len(shape) <= placement.dim < len(shape):
                raise ValueError(f"{placement} does not fit a tensor of shape {shape}")
            placement = type(placement)(placement.dim % len(shape))
            pieces[placement.dim] *= device_mesh.size(axis)
        resolved.append(placement)
    for dim, (size, parts) in enumerate(zip(shape, pieces)):
        if size % parts:
            raise ValueError(f"dim {dim} of size {size} is not divisible by the {parts} ranks that share it")
    return tuple(resolved)


def _check_same_framework(platform: "Platform", device_mesh: Mesh) -> None:
    if not platform.is_mesh(device_mesh):
        raise TypeError(
            f"expected a device mesh of {platform.name}, got {type(device_mesh).__module__}."
            f"{type(device_mesh).__qualname__}; make it with hyper_parallel.init_device_mesh after "
            f'hyper_parallel.set_platform("{platform.name}")'
        )
