"""Our placements and MindSpore's ``Layout``, both ways, for users of MindSpore's ``shard``."""

from mindspore import Layout

from hyper_parallel.core.placement_types import Placement, Replicate, Shard, placement_from

__all__ = ["to_layout", "from_layout"]


def to_layout(device_mesh, placements, ndim):
    """The ``Layout`` of a tensor with ``ndim`` dims under one placement per mesh axis.

    Raises:
        ValueError: a ``Partial`` placement, for which Layout has no word; a mesh without names.
    """
    placements = [placement_from(p) for p in placements]
    if device_mesh.mesh_dim_names is None:
        raise ValueError("a Layout names its mesh axes: pass mesh_dim_names to init_device_mesh")
    if len(placements) != device_mesh.ndim:
        raise ValueError(f"expected {device_mesh.ndim} placements, one per mesh axis, got {len(placements)}")
    axes_of_dim: list[list[str]] = [[] for _ in range(ndim)]
    for name, placement in zip(device_mesh.mesh_dim_names, placements):
        if placement.is_partial():
            raise ValueError(f"mesh axis {name!r} is Partial, which a MindSpore Layout cannot say; reduce it first")
        if placement.is_shard():
            axes_of_dim[placement.dim].append(name)
    ranks = [int(rank) for rank in device_mesh.mesh.ravel()]
    layout = Layout(device_mesh.shape, device_mesh.mesh_dim_names, rank_list=ranks)
    spell = {0: lambda axes: "None", 1: lambda axes: axes[0]}
    return layout(*(spell.get(len(axes), tuple)(axes) for axes in axes_of_dim))


def from_layout(layout):
    """One placement per axis of the layout's mesh, in its order; an axis that shards no dim is ``Replicate``.

    Raises:
        ValueError: several axes shard one dim in another order than the mesh's, which placements cannot say.
    """
    described = layout.to_dict()
    num_axes = len(described["device_matrix"])
    placements: list[Placement] = [Replicate()] * num_axes
    for dim, axes in enumerate(described["tensor_map"]):
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        # MindSpore counts axes from the right; -1 stands for none.
        axes = [num_axes - 1 - axis for axis in axes if axis != -1]
        if axes != sorted(axes):
            raise ValueError(f"dim {dim} is sharded over mesh axes in the order {axes}; placements follow the mesh's")
        for axis in axes:
            placements[axis] = Shard(dim)
    return tuple(placements)
