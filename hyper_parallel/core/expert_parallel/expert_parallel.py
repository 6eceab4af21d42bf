"""The styles that shard an experts module: over experts, inside experts, or both.

Shape suffixes: R rows, E experts, H hidden size, D model size.

One call of a parallelised experts module:

    x_RD --dispatch--> rows of my experts --enter tp--> experts --leave tp--> --combine--> y_RD
           over ep                         id. / sum            sum / id.       over ep

Dispatch and combine only see the mesh ``("ep",)``. The pair "enter tp" and "leave tp" (forward / backward) makes
outputs and gradients complete on every rank; it stands outside of them, where the experts' own shards are used.
"""

import os

from hyper_parallel.core.device_mesh import SlicedOnce, check_mesh
from hyper_parallel.core.expert_parallel import token_exchange
from hyper_parallel.core.expert_parallel.checks import (
    FeedForwardShapes,
    check_inputs,
    check_ready,
    experts_shapes,
    feed_forward_shapes,
)
from hyper_parallel.core.expert_parallel.layer import InsideMoE, ParallelLayer
from hyper_parallel.core.parallel_style import ParallelStyle
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform

__all__ = ["ExpertParallel", "TensorParallel", "ExpertTensorParallel"]

# Which dim of a weight is the hidden one: w1, w3 [E, H, D] and w2 [E, D, H].
HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1}
DEBUG_VARIABLE = "HYPER_PARALLEL_DEBUG"


class _ExpertsStyle(ParallelStyle):
    """What the styles share: validation, sharding, and the path of one call."""

    # Whether the style sums over tp itself inside a MoE layer, so that the layer must not.
    sums_over_tp = False
    # See the styles over tp.
    reduce_dtype = None

    def validate(self, module, device_mesh):
        """Return the module's sizes; raise what :meth:`apply` documents."""
        style, platform = type(self).__name__, get_platform(module)
        if not platform.is_mesh(device_mesh):
            raise TypeError(
                f"{style}: a {platform.name} module needs a {platform.name} mesh from init_device_mesh, "
                f"got {type(device_mesh).__module__}.{type(device_mesh).__qualname__}"
            )
        check_mesh(device_mesh, self.mesh_dim_names, style)
        check_ready(platform, module, style)
        shapes = self._shapes(platform, module)
        for axis, what in (("ep", "num_experts"), ("tp", "hidden_dim")):
            if axis not in self.mesh_dim_names:
                continue
            size, degree = getattr(shapes, what), device_mesh.size(self.mesh_dim_names.index(axis))
            if size % degree:
                raise ValueError(f"{style}: {what} ({size}) must be divisible by the {axis} degree ({degree})")
        return shapes

    def _shapes(self, platform, module):
        return experts_shapes(platform, module, type(self).__name__)

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
        get_platform(module).wrap_forward(module, ParallelLayer(self, shapes, SlicedOnce(device_mesh)))
        return module

    def _call(self, layer, mod, local_forward, x, num_tokens_per_expert, scores=None, *, inside=None):
        """One call of a parallelised experts module; ``inside`` is given by the MoE layer around it."""
        platform, mesh = get_platform(mod), layer.device_mesh
        if inside is not None and inside.rows_are_local:
            return self._run_experts(platform, local_forward, (x, num_tokens_per_expert, scores), None)
        check_inputs(platform, layer.shapes, x, num_tokens_per_expert, scores)
        self._check_replicated(platform, mesh, x=x, num_tokens_per_expert=num_tokens_per_expert, scores=scores)
        arriving = None if inside is None else inside.arriving_counts
        inputs, exchange = self._token_dispatch(mod, (x, num_tokens_per_expert, scores), mesh, arriving)
        tp_mesh = layer.mesh_axis("tp") if inside is None else None
        outputs = self._run_experts(platform, local_forward, inputs, tp_mesh)
        return self._token_combine(mod, outputs, mesh, exchange)

    def _run_experts(self, platform, local_forward, inputs, tp_mesh):
        """Run the experts on their rows; ``tp_mesh`` is None where no sum over tp is wanted."""
        x_RD, num_tokens_per_expert_E, scores_R = inputs

        def forward(x_RD, *scores):
            return local_forward(x_RD, num_tokens_per_expert_E, *scores)

        # A module that takes no scores must still work for calls without them.
        return self._run_inside_tp(platform, forward, (x_RD,) if scores_R is None else (x_RD, scores_R), tp_mesh)

    def _run_inside_tp(self, platform, forward, inputs, tp_mesh):
        """Run what holds a slice of the hidden dim: its output, and its inputs' gradients, are terms of a sum over tp
        (the operators f and g of Megatron-LM, Shoeybi et al. 2019, section 3)."""
        if tp_mesh is None:
            return forward(*inputs)
        group, dtype = tp_mesh.get_group(), self.reduce_dtype
        names = (f"experts: sum of the {what}' gradient over tp" for what in ("rows", "scores"))
        inputs = [platform.copy_to_group(x, group, name, dtype) for x, name in zip(inputs, names)]
        return platform.reduce_from_group(forward(*inputs), group, "experts: sum of the output rows over tp", dtype)

    def begin(self, layer, mod, num_tokens_per_expert):
        """Start what a coming call's dispatch can start early; the MoE layer hands the result to that call."""
        return InsideMoE()

    def _check_replicated(self, platform, device_mesh, **inputs):
        """In debug mode: the ranks of one tp group must have been given the same inputs."""
        if "tp" not in self.mesh_dim_names or os.environ.get(DEBUG_VARIABLE, "0") in ("", "0"):
            return
        group = device_mesh["tp"].get_group()
        for name, value in inputs.items():
            if value is None:
                continue
            digests = platform.digests(value, group, f"debug: all-gather of digests of {name} over tp")
            different = [r for r, digest in enumerate(digests) if digest != digests[0]]
            if different:
                raise ValueError(
                    f"{type(self).__name__}: all tp ranks of one ep coordinate must be given the same {name}; those of "
                    f"tp coordinates {different} differ from that of tp coordinate 0"
                )

    def _partition_fn(self, name, mod, device_mesh):
        """Replace the parameters of ``mod`` by their layout over ``device_mesh``."""
        platform = get_platform(mod)
        for parameter in platform.parameters(mod):
            platform.shard_parameter(mod, parameter, device_mesh, self._placements(parameter))

    def _placements(self, parameter):
        """One placement per mesh axis for the parameter of that name."""
        raise NotImplementedError

    def _token_dispatch(self, mod, inputs, device_mesh, arriving_counts=None):
        """``(x, counts, scores)`` of this rank's rows -> those of this rank's experts, and what combine needs."""
        return inputs, None

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        """Rows of this rank's experts -> rows of this rank, in the order of the call's x."""
        return outputs


class ExpertParallel(_ExpertsStyle):
    """Experts split over a 1-D mesh ``("ep",)``: every parameter ``Shard(0)``.

    Each rank routes its own rows; rows travel to the ranks of their experts and back. Experts' gradients are summed
    over all rows of the group, wherever they came from; see docs/expert_parallel.md for the divisor this implies.
    """

    mesh_dim_names = ("ep",)

    def _shapes(self, platform, module):
        return experts_shapes(platform, module, type(self).__name__, extra_parameters=self.mesh_dim_names == ("ep",))

    def _placements(self, parameter):
        return (Shard(0),)

    def begin(self, layer, mod, num_tokens_per_expert):
        ep_mesh = layer.mesh_axis("ep")
        if ep_mesh is None:
            return InsideMoE()
        return InsideMoE(token_exchange.start_counts(get_platform(mod), num_tokens_per_expert, ep_mesh))

    def _token_dispatch(self, mod, inputs, device_mesh, arriving_counts=None):
        return token_exchange.dispatch(get_platform(mod), *inputs, device_mesh, arriving_counts)

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        return token_exchange.combine(get_platform(mod), outputs, exchange, device_mesh)


class TensorParallel(_ExpertsStyle):
    """The hidden dim split over a 1-D mesh ``("tp",)``, for experts and for a dense ``FeedForward``.

    Experts: w1, w3 ``Shard(1)``, w2 ``Shard(2)``. FeedForward, whose weights have no dim for experts: the weights of
    w1, w3 ``Shard(0)``, of w2 ``Shard(1)``. All ranks must hold the same rows. Outputs and gradients are complete on
    every rank. As the shared expert of a MoE layer whose experts lie on the same tp ranks, a FeedForward leaves its
    sum to the layer.

    Args:
        reduce_dtype: see ``ExpertTensorParallel``.
    """

    mesh_dim_names = ("tp",)

    def __init__(self, *, reduce_dtype=None):
        super().__init__()
        self.reduce_dtype = reduce_dtype

    def _shapes(self, platform, module):
        shapes = feed_forward_shapes(platform, module, type(self).__name__)
        return super()._shapes(platform, module) if shapes is None else shapes

    def _placements(self, parameter):
        return (Shard(HIDDEN_DIM[parameter]),)

    def _partition_fn(self, name, mod, device_mesh):
        platform = get_platform(mod)
        if feed_forward_shapes(platform, mod, type(self).__name__) is None:
            return super()._partition_fn(name, mod, device_mesh)
        for child, linear in dict(platform.named_modules(mod)).items():
            if child in HIDDEN_DIM:
                platform.shard_parameter(linear, "weight", device_mesh, (Shard(HIDDEN_DIM[child] - 1),))

    def _call(self, layer, mod, local_forward, *inputs, inside=None, **keywords):
        if not isinstance(layer.shapes, FeedForwardShapes):
            return super()._call(layer, mod, local_forward, *inputs, inside=inside, **keywords)
        tp_mesh = layer.mesh_axis("tp") if inside is None else None
        return self._run_inside_tp(get_platform(mod), lambda x: local_forward(x, **keywords), inputs, tp_mesh)


class ExpertTensorParallel(ExpertParallel):
    """Experts split over ep, and each expert's hidden dim over tp, on a 2-D mesh ``("ep", "tp")``.

    w1, w3 ``[Shard(0), Shard(1)]``, w2 ``[Shard(0), Shard(2)]``. The tp ranks of one ep coordinate must hold the same
    rows (``HYPER_PARALLEL_DEBUG=1`` checks this at every call). A larger mesh is sliced first: ``mesh["ep", "tp"]``.

    Args:
        reduce_dtype: the framework's dtype in which terms of a sum over tp travel and are added, outputs and gradients
            alike, for example ``torch.float32`` under bfloat16 weights: the sum is then rounded once, at twice the
            bytes over tp. By default the dtype of what is summed. With tp = 2 both are equal, for one addition
            rounds once anyway.
    """

    mesh_dim_names = ("ep", "tp")

    def __init__(self, *, reduce_dtype=None):
        super().__init__()
        self.reduce_dtype = reduce_dtype

    def _placements(self, parameter):
        return (Shard(0), Shard(HIDDEN_DIM[parameter]))

    def _token_dispatch(self, mod, inputs, device_mesh, arriving_counts=None):
        return super()._token_dispatch(mod, inputs, device_mesh["ep"], arriving_counts)

    def _token_combine(self, mod, outputs, device_mesh, exchange):
        return super()._token_combine(mod, outputs, device_mesh["ep"], exchange)
