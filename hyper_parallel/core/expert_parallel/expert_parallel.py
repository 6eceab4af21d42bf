"""The styles that shard an experts module: over experts, inside experts, or both.

Shape suffixes: R rows, E experts, H hidden size, D model size; K experts per token, P ranks of the ep group.
"""

from typing import Any

from hyper_parallel.core.expert_parallel.checks import (
    ExpertShapes,
    FeedForwardShapes,
    experts_shapes,
    feed_forward_shapes,
)
from hyper_parallel.core.expert_parallel.exchange import DedupExchange, Exchange, Places, SplitExchange
from hyper_parallel.core.expert_parallel.exchange.rows import return_rows, send_rows
from hyper_parallel.core.expert_parallel.experts_style import ExpertsStyle
from hyper_parallel.core.expert_parallel.sharded import Sharded, ShardedFeedForward
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.core.types import Mesh, Module, Tensor
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Platform

__all__ = [
    "HIDDEN_DIM",
    "DedupExpertTensorParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "SplitExpertTensorParallel",
    "TensorParallel",
]

# Which dim of a weight is the hidden one: w1, w3 [E, H, D] and w2 [E, D, H].
HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1}


class ExpertParallel(ExpertsStyle):
    """Experts split over a 1-D mesh ``("ep",)``: every parameter ``Shard(0)``.

    Each rank routes its own rows; rows travel to the ranks of their experts and back. Experts' gradients are summed
    over all rows of the group, wherever they came from; see docs/training.md for the divisor this implies.

    Args:
        ep_axis: the name of the mesh's axis.
    """

    mesh_dim_names: tuple[str, ...] = ("ep",)

    def __init__(self, *, ep_axis: str = "ep") -> None:
        super().__init__()
        self._name_axes(ep_axis=ep_axis)

    def _shapes(self, platform: Platform, module: Module) -> ExpertShapes:
        over_ep_alone = type(self).mesh_dim_names == ("ep",)
        return experts_shapes(platform, module, type(self).__name__, extra_parameters=over_ep_alone)

    def _placements(self, parameter: str) -> tuple[Placement, ...]:
        return (Shard(0),)

    def _token_dispatch(self, mod: Module, inputs: tuple, device_mesh: Mesh | None) -> tuple[tuple, Any]:
        x_RD, counts_E, scores_R = inputs
        return send_rows(get_platform(mod), x_RD, counts_E, scores_R, device_mesh)

    def _token_combine(self, mod: Module, outputs: Tensor, device_mesh: Mesh | None, trip: Any) -> Tensor:
        return return_rows(get_platform(mod), outputs, trip, device_mesh)

    def _replaces_bare_dispatch_only(self) -> bool:
        of_style, ours = type(self), ExpertParallel
        replaced = [name for name in ("_token_dispatch", "_token_combine") if _differs(of_style, ours, name)]
        return bool(replaced) and not _differs(of_style, ExpertsStyle, "make_exchange")


def _differs(cls: type, base: type, name: str) -> bool:
    return getattr(cls, name) is not getattr(base, name)


class TensorParallel(ExpertsStyle):
    """The hidden dim split over a 1-D mesh ``("tp",)``, for experts and for a dense ``FeedForward``.

    Experts: w1, w3 ``Shard(1)``, w2 ``Shard(2)``. FeedForward, whose weights have no dim for experts: the weights of
    w1, w3 ``Shard(0)``, of w2 ``Shard(1)``. All ranks must hold the same rows. Outputs and gradients are complete on
    every rank. As the shared expert of a MoE layer whose experts lie on the same tp ranks, a FeedForward leaves its
    sum to the layer.

    Args:
        reduce_dtype: see ``ExpertTensorParallel``.
        tp_axis: the name of the mesh's axis.
    """

    mesh_dim_names: tuple[str, ...] = ("tp",)

    def __init__(self, *, reduce_dtype: Any = None, tp_axis: str = "tp") -> None:
        super().__init__()
        self.reduce_dtype = reduce_dtype
        self._name_axes(tp_axis=tp_axis)

    def _shapes(self, platform: Platform, module: Module) -> Any:
        shapes = feed_forward_shapes(platform, module, type(self).__name__)
        return super()._shapes(platform, module) if shapes is None else shapes

    def _bind(self, shapes: Any, platform: Platform, device_mesh: Mesh, name: str) -> Sharded:
        if not isinstance(shapes, FeedForwardShapes):
            return super()._bind(shapes, platform, device_mesh, name)
        return ShardedFeedForward(self, platform, name, shapes, device_mesh, None, device_mesh)

    def _placements(self, parameter: str) -> tuple[Placement, ...]:
        return (Shard(HIDDEN_DIM[parameter]),)

    def _partition_fn(self, name: str, mod: Module, device_mesh: Mesh) -> None:
        platform = get_platform(mod)
        layers = {child: layer for child, layer in platform.named_modules(mod) if child in HIDDEN_DIM}
        if not layers:
            return super()._partition_fn(name, mod, device_mesh)
        for child, linear in layers.items():
            platform.shard_parameter(linear, "weight", device_mesh, (Shard(HIDDEN_DIM[child] - 1),))


class ExpertTensorParallel(ExpertParallel):
    """Experts split over ep, and each expert's hidden dim over tp, on a 2-D mesh ``("ep", "tp")``.

    w1, w3 ``[Shard(0), Shard(1)]``, w2 ``[Shard(0), Shard(2)]``. The tp ranks of one ep coordinate must hold the same
    rows (``HYPER_PARALLEL_DEBUG=1`` checks this at every call). A larger mesh is sliced first: ``mesh["ep", "tp"]``.

    Args:
        reduce_dtype: the framework's dtype in which terms of a sum over tp travel and are added, outputs and gradients
            alike, for example ``torch.float32`` under bfloat16 weights: the sum is then rounded once, at twice the
            bytes over tp. By default the dtype of what is summed. With tp = 2 both are equal, for one addition
            rounds once anyway.
        ep_axis, tp_axis: the names of the mesh's axes, in this order; TorchTitan's are "ep" and "etp".
    """

    mesh_dim_names = ("ep", "tp")

    def __init__(self, *, reduce_dtype: Any = None, ep_axis: str = "ep", tp_axis: str = "tp") -> None:
        super().__init__(ep_axis=ep_axis)
        self.reduce_dtype = reduce_dtype
        self._name_axes(ep_axis=ep_axis, tp_axis=tp_axis)

    def _placements(self, parameter: str) -> tuple[Placement, ...]:
        return (Shard(0), Shard(HIDDEN_DIM[parameter]))


class DedupExpertTensorParallel(ExpertTensorParallel):
    """A token of a MoE layer crosses to an ep rank once, however many of its experts live there.

    The expert's rank copies it to its experts, weights and sums their outputs, and sends one row back. With uniform
    routing over P ranks a token travels to ``P * (1 - (1 - 1/P)^K)`` ranks instead of K times. Results differ from
    ``ExpertTensorParallel`` by the order of a token's sum only. Applied to bare experts, which see rows and not which
    of them are one token, it is that style.
    """

    def make_exchange(self, places: Places) -> Exchange:
        return super().make_exchange(places) if places.ep_mesh is None else DedupExchange(places)


class SplitExpertTensorParallel(ExpertTensorParallel):
    """In a MoE layer each tp rank sends its share of the tokens: over ep every row travels once, not once per tp rank.

    The tp ranks gather the arrived rows from each other before the experts, and after the experts each gets the sum of
    its own back. For clusters where ep crosses hosts and tp does not: 1/tp of the bytes over ep, for an all-gather and
    a reduce-scatter of the rows over tp. Any number of tokens will do; shares differ by one at most. Terms of the sum
    over tp travel in the dtype of the rows: there is no ``reduce_dtype``. Applied to bare experts it is
    ``ExpertTensorParallel``.

    Args:
        ep_axis, tp_axis: see ``ExpertTensorParallel``.
    """

    def __init__(self, *, ep_axis: str = "ep", tp_axis: str = "tp") -> None:
        super().__init__(ep_axis=ep_axis, tp_axis=tp_axis)

    def make_exchange(self, places: Places) -> Exchange:
        return super().make_exchange(places) if places.tp_mesh is None else SplitExchange(places)
