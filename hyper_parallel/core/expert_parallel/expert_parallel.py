"""The styles that shard an experts module: over experts, inside experts, or both.

Shape suffixes: R rows, E experts, H hidden size, D model size.

One call of a parallelised experts module:

    x_RD --dispatch--> rows of my experts --enter tp--> experts --leave tp--> --combine--> y_RD
           over ep                         id. / sum            sum / id.       over ep

Dispatch and combine only see the mesh ``("ep",)``. The pair "enter tp" and "leave tp" (forward / backward) makes
outputs and gradients complete on every rank; it stands outside of them, where the experts' own shards are used.
"""

import functools
import os

from hyper_parallel.core.device_mesh import check_mesh
from hyper_parallel.core.expert_parallel import token_exchange
from hyper_parallel.core.expert_parallel.checks import check_inputs, experts_shapes
from hyper_parallel.core.parallel_style import ParallelStyle
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform

__all__ = ["ExpertParallel", "TensorParallel", "ExpertTensorParallel"]

# Which dim of a weight is the hidden one: w1, w3 [E, H, D] and w2 [E, D, H].
HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1}
DEBUG_VARIABLE = "HYPER_PARALLEL_DEBUG"


class _ExpertsStyle(ParallelStyle):
    """What the three styles share: validation, sharding, and the path of one call."""

    def validate(self, module, device_mesh):
        """Return the module's sizes; raise what :meth:`apply` documents."""
        style, platform = type(self).__name__, get_platform(module)
        if not platform.is_mesh(device_mesh):
            raise TypeError(
                f"{style}: a {platform.name} module needs a {platform.name} mesh from init_device_mesh, "
                f"got {type(device_mesh).__module__}.{type(device_mesh).__qualname__}"
            )
        check_mesh(device_mesh, self.mesh_dim_names, style)
        shapes = experts_shapes(platform, module, style, extra_parameters=self.mesh_dim_names == ("ep",))
        for axis, what, size in (("ep", "num_experts", shapes.num_experts), ("tp", "hidden_dim", shapes.hidden_dim)):
            if axis in self.mesh_dim_names and size % device_mesh.size(self.mesh_dim_names.index(axis)):
                degree = device_mesh.size(self.mesh_dim_names.index(axis))
                raise ValueError(f"{style}: {what} ({size}) must be divisible by the {axis} degree ({degree})")
        return shapes

    def apply(self, module, device_mesh):
        """Shard an experts module in place, so that it computes on every rank what one device computes.

        Every rank of the mesh calls this. The weights of the mesh's first rank are the ones that are laid out.
        Afterwards ``module(x, num_tokens_per_expert, scores=None)`` takes the rows of this ep coordinate, counts over
        all experts, and gives complete outputs and gradients; see ``GroupedExperts`` for the shapes.

        Args:
            module: a module with parameters w1, w3 [E, H, D] and w2 [E, D, H].
            device_mesh: a mesh with exactly the axes of ``mesh_dim_names``.

        Returns:
            ``module``; its class is now a subclass that names the style.

        Raises:
            TypeError: not a module, or a mesh of another framework.
            ValueError: mesh names, parameter shapes, or sizes that do not divide. RuntimeError: a second ``apply``.
            After an error the module is as it was.
        """
        shapes = self.validate(module, device_mesh)
        self._partition_fn("", module, device_mesh)
        # The wrapper holds no module: a deep copy must call itself, not the original.
        call = functools.partial(self._call, shapes, device_mesh)
        get_platform(module).wrap_forward(module, type(self).__name__, call)
        return module

    def _call(self, shapes, device_mesh, mod, local_forward, x_RD, num_tokens_per_expert_E, scores_R=None):
        platform = get_platform(mod)
        check_inputs(platform, shapes, x_RD, num_tokens_per_expert_E, scores_R)
        self._check_replicated_rows(platform, x_RD, device_mesh)
        inputs, exchange = self._token_dispatch(mod, (x_RD, num_tokens_per_expert_E, scores_R), device_mesh)
        outputs = self._run_experts(platform, local_forward, inputs, device_mesh)
        return self._token_combine(mod, outputs, device_mesh, exchange)

    def _check_replicated_rows(self, platform, x_RD, device_mesh):
        """In debug mode: the ranks of one tp group must have been given the same rows."""
        if "tp" not in self.mesh_dim_names or os.environ.get(DEBUG_VARIABLE, "0") in ("", "0"):
            return
        group = device_mesh["tp"].get_group()
        digests = platform.digests(x_RD, group, "debug: all-gather of row digests over tp")
        different = [r for r, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise ValueError(
                f"{type(self).__name__}: all tp ranks of one ep coordinate must hold the same rows; those of tp "
                f"coordinates {different} differ from those of tp coordinate 0"
            )

    def _partition_fn(self, name, mod, device_mesh):
        """Replace the parameters of ``mod`` by their layout over ``device_mesh``."""
        platform = get_platform(mod)
        for parameter in platform.parameters(mod):
            platform.shard_parameter(mod, parameter, device_mesh, self._placements(parameter))

    def _placements(self, parameter):
        """One placement per mesh axis for the parameter of that name."""
        raise NotImplementedError

    def _token_dispatch(self, mod, inputs, device_mesh):
        """``(x, counts, scores)`` of this rank's rows -> those of this rank's experts, and what combine needs."""
        return inputs, None

    def _run_experts(self, platform, local_forward, inputs, device_mesh):
        return _forward(local_forward, *inputs)

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        """Rows of this rank's experts -> rows of this rank, in the order of the call's x."""
        return outputs


class ExpertParallel(_ExpertsStyle):
    """Experts split over a 1-D mesh ``("ep",)``: every parameter ``Shard(0)``.

    Each rank routes its own rows; rows travel to the ranks of their experts and back. Experts' gradients are summed
    over all rows of the group, wherever they came from; see docs/expert_parallel.md for the divisor this implies.
    """

    mesh_dim_names = ("ep",)

    def _placements(self, parameter):
        return (Shard(0),)

    def _token_dispatch(self, mod, inputs, device_mesh):
        return token_exchange.dispatch(get_platform(mod), *inputs, device_mesh)

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        return token_exchange.combine(get_platform(mod), outputs, exchange, device_mesh)


class TensorParallel(_ExpertsStyle):
    """Each expert's hidden dim split over a 1-D mesh ``("tp",)``: w1, w3 ``Shard(1)``, w2 ``Shard(2)``.

    All ranks must hold the same rows. Outputs and gradients are complete on every rank.
    """

    mesh_dim_names = ("tp",)

    def _placements(self, parameter):
        return (Shard(HIDDEN_DIM[parameter]),)

    def _run_experts(self, platform, local_forward, inputs, device_mesh):
        return _run_inside_tp(platform, local_forward, inputs, device_mesh)


class ExpertTensorParallel(ExpertParallel):
    """Experts split over ep, and each expert's hidden dim over tp, on a 2-D mesh ``("ep", "tp")``.

    w1, w3 ``[Shard(0), Shard(1)]``, w2 ``[Shard(0), Shard(2)]``. The tp ranks of one ep coordinate must hold the same
    rows (``HYPER_PARALLEL_DEBUG=1`` checks this at every call). A larger mesh is sliced first: ``mesh["ep", "tp"]``.
    """

    mesh_dim_names = ("ep", "tp")

    def _placements(self, parameter):
        return (Shard(0), Shard(HIDDEN_DIM[parameter]))

    def _token_dispatch(self, mod, inputs, device_mesh):
        return super()._token_dispatch(mod, inputs, device_mesh["ep"])

    def _run_experts(self, platform, local_forward, inputs, device_mesh):
        return _run_inside_tp(platform, local_forward, inputs, device_mesh["tp"])

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        return super()._token_combine(mod, outputs, device_mesh["ep"], exchange)


def _run_inside_tp(platform, local_forward, inputs, tp_mesh):
    """Run experts that hold a slice of the hidden dim: their outputs, and their inputs' gradients, are terms of a sum
    over tp (Megatron-LM's f and g operators, Shoeybi et al. 2019, section 3)."""
    if tp_mesh.size() == 1:
        return _forward(local_forward, *inputs)
    x_RD, num_tokens_per_expert_E, scores_R = inputs
    group = tp_mesh.get_group()
    x_RD = platform.copy_to_group(x_RD, group, "experts: sum of the rows' gradient over tp")
    if scores_R is not None:
        scores_R = platform.copy_to_group(scores_R, group, "experts: sum of the scores' gradient over tp")
    y_RD = _forward(local_forward, x_RD, num_tokens_per_expert_E, scores_R)
    return platform.reduce_from_group(y_RD, group, "experts: sum of the output rows over tp")


def _forward(local_forward, x_RD, num_tokens_per_expert_E, scores_R):
    # A module that takes no scores must still work for calls without them.
    inputs = (x_RD, num_tokens_per_expert_E)
    return local_forward(*inputs) if scores_R is None else local_forward(*inputs, scores_R)
