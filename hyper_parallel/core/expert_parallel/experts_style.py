"""What the styles of experts share: validation, sharding, and binding a module to its places."""

from abc import abstractmethod
from typing import Any

from hyper_parallel.core.device_mesh import check_mesh
from hyper_parallel.core.expert_parallel.checks import ExpertShapes, check_buffers, check_ready, experts_shapes
from hyper_parallel.core.expert_parallel.exchange import Exchange, Places, RowsExchange
from hyper_parallel.core.expert_parallel.packed import PackedShapes, ShardedPacked, packed_shapes, placements_of
from hyper_parallel.core.expert_parallel.sharded import Sharded, ShardedExperts
from hyper_parallel.core.parallel_style import ParallelStyle
from hyper_parallel.core.placement_types import Placement
from hyper_parallel.core.types import Mesh, Module, SameModule, Tensor
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Platform

__all__ = ["ExpertsStyle"]


class ExpertsStyle(ParallelStyle):
    """Shards an experts module; the subclass says over which axes, and how."""

    # See the styles over tp.
    reduce_dtype: Any = None

    def validate(self, module: Module, device_mesh: Mesh) -> Any:
        """Return the module's sizes; raise what :meth:`apply` documents."""
        style, platform = type(self).__name__, get_platform(module)
        if not platform.is_mesh(device_mesh):
            raise TypeError(
                f"{style}: a {platform.name} module needs a {platform.name} mesh from init_device_mesh, "
                f"got {type(device_mesh).__module__}.{type(device_mesh).__qualname__}"
            )
        check_mesh(device_mesh, self.mesh_dim_names, style)
        check_ready(platform, module, style)
        shapes = packed_shapes(platform, module, style) or self._shapes(platform, module)
        for axis, what in (("ep", "num_experts"), ("tp", "hidden_dim")):
            if axis not in self.mesh_dim_names:
                continue
            size, degree = getattr(shapes, what), device_mesh.size(self.mesh_dim_names.index(axis))
            if size % degree:
                raise ValueError(f"{style}: {what} ({size}) must be divisible by the {axis} degree ({degree})")
        if isinstance(shapes, ExpertShapes):
            check_buffers(platform, module, shapes, self.mesh_dim_names, style)
        if self.reduce_dtype is not None and not platform.is_floating(self.reduce_dtype):
            raise ValueError(
                f"{style}: reduce_dtype must be a floating dtype of {platform.name}, such as {platform.name}.float32, "
                f"got {self.reduce_dtype!r}"
            )
        return shapes

    def apply(self, module: SameModule, device_mesh: Mesh) -> SameModule:
        """Shard an experts module in place, so that it computes on every rank what one device computes.

        Every rank of the mesh calls this. The weights of the mesh's first rank are the ones that are laid out. After
        an error the module is as it was.
        Afterwards ``module(x, num_tokens_per_expert, scores=None)`` takes the rows of this ep coordinate, counts over
        all experts, and gives complete outputs and gradients; see ``GroupedExperts`` for the shapes.

        Args:
            module: a module with parameters w1, w3 [E, H, D] and w2 [E, D, H]; on torch also Hugging Face's experts,
                which are then called as before (docs/huggingface.md).
            device_mesh: a mesh with exactly the axes of ``mesh_dim_names``.

        Returns:
            ``module``; its class is now a subclass that names the style.

        Raises:
            TypeError: not a module, or a mesh of another framework.
            ValueError: mesh names, parameter shapes, or sizes that do not divide. RuntimeError: a second ``apply``.
        """
        shapes, platform = self.validate(module, device_mesh), get_platform(module)
        sharded = self._bind(shapes, platform, device_mesh, type(module).__name__)
        # A class that cannot be subclassed says so here, before anything is changed.
        if isinstance(shapes, PackedShapes):
            packed = platform.packed_experts()
            put_on = packed.wrap(module, sharded)
            packed.shard(module, shapes, device_mesh, placements_of(shapes, self.mesh_dim_names))
        else:
            put_on = platform.wrap_forward(module, sharded)
            self._partition_fn("", module, device_mesh)
        put_on()
        return module

    def make_exchange(self, places: Places) -> Exchange:
        """How the tokens of a MoE layer travel to experts at these places; asked once, at ``apply``.

        A style with a way of its own overrides this; see docs/adding_a_style.md.
        """
        return RowsExchange(places)

    def _bind(self, shapes: Any, platform: Platform, device_mesh: Mesh, name: str) -> Sharded:
        axes = {axis: self._axis(device_mesh, axis) for axis in ("ep", "tp")}
        shared = {axis: None if mesh is None or mesh.size() == 1 else mesh for axis, mesh in axes.items()}
        places = Places(platform, shapes.num_experts, shared["ep"], shared["tp"])
        if isinstance(shapes, PackedShapes):
            way = self.make_exchange(places)
            return ShardedPacked(self, platform, name, shapes, device_mesh, axes["ep"], axes["tp"], way)
        exchange = None if self._replaces_bare_dispatch_only() else self.make_exchange(places)
        return ShardedExperts(self, platform, name, shapes, device_mesh, axes["ep"], axes["tp"], exchange)

    def _axis(self, device_mesh: Mesh, axis: str) -> Mesh | None:
        """The 1-D mesh of an axis, or None where the style does not use it."""
        if axis not in self.mesh_dim_names:
            return None
        return device_mesh if device_mesh.ndim == 1 else device_mesh[axis]

    def _replaces_bare_dispatch_only(self) -> bool:
        return False

    def _shapes(self, platform: Platform, module: Module) -> ExpertShapes:
        return experts_shapes(platform, module, type(self).__name__)

    def _partition_fn(self, name: str, mod: Module, device_mesh: Mesh) -> None:
        """Replace the parameters of ``mod`` by their layout over ``device_mesh``."""
        platform = get_platform(mod)
        for parameter in platform.parameters(mod):
            platform.shard_parameter(mod, parameter, device_mesh, self._placements(parameter))

    @abstractmethod
    def _placements(self, parameter: str) -> tuple[Placement, ...]:
        """One placement per mesh axis for the parameter of that name."""

    def _token_dispatch(self, mod: Module, inputs: tuple, device_mesh: Mesh | None) -> tuple[tuple, Any]:
        """For bare experts, ``(x, counts, scores)`` of this rank's rows -> those of this rank's experts, and what
        combine needs. ``device_mesh`` is the mesh's slice ``mesh["ep"]``, or None for a style without that axis."""
        return inputs, None

    def _token_combine(self, mod: Module, outputs: Tensor, device_mesh: Mesh | None, trip: Any) -> Tensor:
        """For bare experts, rows of this rank's experts -> rows of this rank, in the order of the call's x."""
        return outputs
