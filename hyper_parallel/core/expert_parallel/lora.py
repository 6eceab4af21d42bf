"""Low-rank adapters (LoRA) on experts that a style has sharded: ``W + scaling * B A`` for each expert, W frozen.

Where tp cuts the hidden dim of a weight it cuts one of the two factors alike, and every tp rank holds the other whole:

    w1, w3, gate_up_proj, up_proj [E, H, D]     A [E, r, D] whole     B [E, H, r] cut
    w2, down_proj                 [E, D, H]     A [E, r, H] cut       B [E, D, r] whole

A rank uses a whole factor for its own slice of the hidden dim only, so the gradient that it finds there is a term of a
sum over tp, forward values notwithstanding. One collective per module and backward makes all of them complete.

Shape suffixes: R rows, E experts, L experts of one rank, H hidden size, D model size, r rank; K, N in and out features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from hyper_parallel.core.expert_parallel.checks import check_counts, check_fit
from hyper_parallel.core.placement_types import Placement, Replicate, Shard, placement_from
from hyper_parallel.core.types import Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Adapter", "Lora", "Weight"]

# A weight of stacked experts: shape, the dim that tp cuts, and whether it is the one that leads back to D.
Weight = tuple[tuple[int, ...], int, bool]
# A weight and its factors, if it has an adapter: (w, a, b).
Adapted = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Adapter:
    """The two factors of one weight.

    Attributes:
        weight: its name.
        is_down: whether it leads from H back to D: then B is whole on every tp rank, else A.
        transposed: whether the weight is stored as [E, K, N].
        shape_a: [E, r, K]. shape_b: [E, N, r], where gate and up follow each other [E, 2, H, r].
        placements_a, placements_b: one per axis of the weight's mesh.
    """

    weight: str
    is_down: bool
    transposed: bool
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    placements_a: tuple[Placement, ...]
    placements_b: tuple[Placement, ...]

    @property
    def names(self) -> tuple[str, str]:
        """Of the parameters A and B, beside the weight."""
        return f"lora_A_{self.weight}", f"lora_B_{self.weight}"

    @staticmethod
    def of(name: str, weight: Weight, placements: Sequence[Any], r: int) -> "Adapter":
        """The adapter of rank r of a weight that is laid out by ``placements``."""
        (num_experts, *dims), hidden, is_down = weight
        transposed = (hidden == len(dims)) != is_down
        (num_in, *out) = dims if transposed else (dims[-1], *dims[:-1])
        pairs = [_of_factors(placement_from(p), name, hidden, is_down, len(out)) for p in placements]
        return Adapter(
            name,
            is_down,
            transposed,
            (num_experts, r, num_in),
            (num_experts, *out, r),
            tuple(a for a, _ in pairs),
            tuple(b for _, b in pairs),
        )


def _of_factors(
    placement: Placement, name: str, hidden: int, is_down: bool, last_out: int
) -> tuple[Placement, Placement]:
    """Where A and B lie on an axis on which the weight lies so."""
    if placement.is_replicate() or placement.is_shard(0):
        return placement, placement
    if not placement.is_shard(hidden):
        raise ValueError(
            f"{name} is laid out as {placement}; adapters are known for weights cut over experts or hidden"
        )
    return (Shard(2), Replicate()) if is_down else (Replicate(), Shard(last_out))


@dataclass(frozen=True)
class Lora:
    """The adapters of one module.

    Attributes:
        r, alpha: rank and strength: the product of the factors counts ``alpha / r`` times.
        adapters: by the weight's name, in the order of the module's parameters.
        on_rows: the module is known to compute SwiGLU, and rows go through the factors, one after the other. If not,
            its own forward finds ``W + scaling * B A`` in the place of W.
    """

    r: int
    alpha: float
    adapters: Mapping[str, Adapter]
    on_rows: bool

    @property
    def scaling(self) -> float:
        return self.alpha / self.r

    def around(self, sharded: Any, mod: Module, local_forward: Callable) -> Callable:
        """What computes with the adapters in the place of the module's own forward on its shards."""
        return partial(self._experts, sharded, mod) if self.on_rows else local_forward

    def with_products(self, sharded: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``W + scaling * B A`` of every adapted weight, of this rank's parts ``values`` of the parameters; gradients
        flow to A and B, complete on every rank."""
        factors = self._factors(sharded, values)
        return {name: self._sum(sharded.platform, name, values[name], *factors[name]) for name in factors}

    def merged(self, platform: Platform, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """``W + scaling * B A`` of one weight, without the gradients' sums."""
        return self._sum(platform, name, values[name], *(values[factor] for factor in self.adapters[name].names))

    def _sum(self, platform: Platform, name: str, weight: Tensor, a_LrK: Tensor, b: Tensor) -> Tensor:
        b_LNr = b.reshape((a_LrK.shape[0], -1, self.r))
        if self.adapters[name].transposed:
            return platform.add_products(weight, a_LrK.swapaxes(1, 2), b_LNr.swapaxes(1, 2), self.scaling)
        return platform.add_products(weight, b_LNr, a_LrK, self.scaling)

    def _factors(self, sharded: Any, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of every adapted weight, whose gradients will be complete."""
        found = {name: [values[factor] for factor in adapter.names] for name, adapter in self.adapters.items()}
        if sharded.tp_group is not None:
            of_tp = [(name, int(adapter.is_down)) for name, adapter in self.adapters.items()]
            whole = _complete_over_tp(sharded, [found[name][factor] for name, factor in of_tp])
            for (name, factor), value in zip(of_tp, whole):
                found[name][factor] = value
        return {name: (a, b) for name, (a, b) in found.items()}

    def _experts(
        self, sharded: Any, mod: Module, x_RD: Tensor, counts_L: Tensor, scores_R: Tensor | None = None
    ) -> Tensor:
        """SwiGLU experts on rows sorted by expert; see ``grouped_experts``. No expert's ``B A`` is ever formed."""
        platform = sharded.platform
        values = {name: platform.local(value) for name, value in platform.parameters(mod).items()}
        gate, up, down = self._adapted(values, self._factors(sharded, values))
        check_fit(platform, x_RD, down[0])
        if not platform.made_by_host(counts_L):
            (counts,) = platform.to_host(counts_L)
            check_counts(counts, x_RD.shape[0])
            counts_L = platform.int_tensor(counts, like=x_RD)
        low = {id(a): self._low(platform, x_RD, a, counts_L) for _, a, _ in (gate, up)}  # gate and up may share it
        gate_RH, up_RH = (_product(platform, x_RD, *each, low[id(each[1])], counts_L) for each in (gate, up))
        hidden_RH = platform.swiglu(gate_RH, up_RH)
        low_Rr = self._low(platform, hidden_RH, down[1], counts_L)
        if scores_R is not None:  # on both sides of the sum: what the scores scale is what the factor keeps anyway
            hidden_RH = platform.scale_rows(hidden_RH, scores_R)
            low_Rr = None if low_Rr is None else platform.scale_rows(low_Rr, scores_R)
        return _product(platform, hidden_RH, *down, low_Rr, counts_L)

    def _adapted(
        self, values: Mapping[str, Tensor], factors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> tuple[Adapted, Adapted, Adapted]:
        """Gate, up and down."""

        def adapted(name: str) -> Adapted:
            return (values[name], *factors.get(name, (None, None)))

        if "w1" in values:
            return adapted("w1"), adapted("w3"), adapted("w2")
        both, a, b = adapted("gate_up_proj")
        gate, up = ((both[:, i], a, b if b is None else b[:, i]) for i in (0, 1))
        return gate, up, adapted("down_proj")

    def _low(self, platform: Platform, x_RK: Tensor, a_LrK: Tensor | None, counts_L: Tensor) -> Tensor | None:
        """Rows behind the first factor: [R, r]."""
        return None if a_LrK is None else platform.grouped_linear(x_RK, a_LrK, counts_L) * self.scaling


def _product(
    platform: Platform,
    x_RK: Tensor,
    w_LNK: Tensor,
    a_LrK: Tensor | None,
    b_LNr: Tensor | None,
    low_Rr: Tensor | None,
    counts_L: Tensor,
) -> Tensor:
    y_RN = platform.grouped_linear(x_RK, w_LNK, counts_L)
    if b_LNr is None or low_Rr is None:
        return y_RN
    return y_RN + platform.grouped_linear(low_Rr, b_LNr, counts_L)


def _complete_over_tp(sharded: Any, whole: Sequence[Tensor]) -> list[Tensor]:
    """Factors that every tp rank holds, whose gradients are summed over tp, all of them in one collective."""
    platform, num_local = sharded.platform, whole[0].shape[0]
    name = f"lora: sum of the adapters' gradient over {sharded.tp_axis}"
    flat = platform.concat([value.reshape((num_local, -1)) for value in whole], 1)
    flat = platform.copy_to_group(flat, sharded.tp_group, name, sharded.style.reduce_dtype)
    parts, start = [], 0
    for value in whole:
        end = start + prod(value.shape[1:])
        parts.append(flat[:, start:end].reshape(tuple(value.shape)))
        start = end
    return parts
