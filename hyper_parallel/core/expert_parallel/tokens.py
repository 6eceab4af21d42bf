"""How tokens come to a MoE layer and leave it where they are cut over tp: sequence parallel.

    x, 1/tp of the tokens --all-gather--> all tokens --router, experts, shared expert--> --reduce-scatter--> 1/tp

Between the two everything is as in a layer whose tp ranks hold the same tokens, and so are gradients: those of the
router, and of a shared expert that every tp rank holds whole, are complete on every rank.

Shape suffixes: T tokens of all tp ranks, S tokens of this one, D model size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.device_mesh import axis_name
from hyper_parallel.core.expert_parallel.agreement import Sending, agreed_counts, described, ranks_of
from hyper_parallel.core.expert_parallel.checks import check_tokens
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["COMPLETE_OVER", "TokenLayout", "Tokens", "chunk_sizes"]

COMPLETE_OVER = "_hyper_parallel_complete_over"
"""Attribute of a parameter: global ranks that see different tokens, and all of which have its complete gradient."""


def chunk_sizes(size: int, num_chunks: int) -> list[int]:
    """Sizes of the chunks that ``torch.chunk`` cuts: equal but for the last ones, which may be smaller, or empty."""
    largest = -(-size // num_chunks)
    return [min(largest, max(0, size - largest * r)) for r in range(num_chunks)]


class Tokens(NamedTuple):
    """Tokens of one call, flat, those of tp rank 0 first.

    Attributes:
        complete_TD: for what every tp rank computes alike.
        terms_TD: the same for what is cut over tp; None where nothing asks for it.
        own_SD: those of this rank; None where every rank was given all.
        shapes: shape of each rank's tokens as the caller holds them.
        whole_shape: shape of all of them, where a distributed tensor says so.
    """

    complete_TD: Tensor
    terms_TD: Tensor | None
    own_SD: Tensor | None
    shapes: list[tuple[int, ...]]
    whole_shape: tuple[int, ...] | None

    @property
    def splits(self) -> list[int]:
        """Tokens of each tp rank."""
        return [prod(shape[:-1]) for shape in self.shapes]


@dataclass(frozen=True)
class TokenLayout:
    """The layouts of a layer's input and output over tp, bound to the layer once, at ``apply``.

    Attributes:
        platform: the layer's. mesh: the 1-D mesh of tp.
        given, wanted: placements of the layer's input and output; one of them is a ``Shard``.
        use_local_output: return the local tensor, not a distributed one.
    """

    platform: Platform
    mesh: Mesh
    given: Placement
    wanted: Placement
    use_local_output: bool

    def __deepcopy__(self, memo: dict) -> "TokenLayout":
        return self  # the same places

    @property
    def axis(self) -> str:
        """The name of the mesh's axis."""
        return axis_name(self.mesh)

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in order."""
        return self.mesh.mesh.tolist()

    def enter(self, moe: Any, x: Any, with_terms: bool, dtype: Any) -> Tokens:
        """All tokens, for x as the caller holds them: this rank's part, or all of them. A distributed tensor is taken
        as what it is, and its gradient has its layout."""
        platform = self.platform
        x, whole_shape = platform.local_tokens(x, self.mesh, self.given)
        check_tokens(platform, moe, x)
        dim = self._dim(x)
        shapes = self._shapes(x, dim, whole_shape)
        group, name = self.mesh.get_group(), f"moe: {{}} of the tokens over {self.axis}"
        if not self.given.is_shard():
            complete_TD = _in_rank_order(platform, x, dim, shapes)
            terms_TD = None
            if with_terms:
                name = f"moe: sum of the tokens' gradient over {self.axis}"
                terms_TD = platform.copy_to_group(complete_TD, group, name, dtype)
            return Tokens(complete_TD, terms_TD, None, shapes, whole_shape)
        own_SD = x.reshape((prod(x.shape[:-1]), x.shape[-1]))
        tokens = Tokens(own_SD, own_SD if with_terms else None, own_SD, shapes, whole_shape)
        if self.mesh.size() == 1:
            return tokens
        name = name.format("all-gather")
        if with_terms:
            complete_TD, terms_TD = platform.gather_tokens(own_SD, tokens.splits, group, name, dtype)
            return tokens._replace(complete_TD=complete_TD, terms_TD=terms_TD)
        return tokens._replace(complete_TD=platform.gather_from_group(own_SD, tokens.splits, group, name))

    def leave(
        self, tokens: Tokens, terms_TD: Tensor | None, complete_TD: Tensor | None, own_SD: Tensor | None, dtype: Any
    ) -> Any:
        """The layer's output in its layout: terms of a sum over tp, what is the same on every rank, and what is this
        rank's alone, all added up. Any of them may be None, but not all."""
        platform, group = self.platform, self.mesh.get_group()
        name = f"moe: {{}} of the output tokens over {self.axis}"
        if self.mesh.size() == 1:
            y_TD = _added(terms_TD, complete_TD, own_SD)
        elif not self.wanted.is_shard():
            if terms_TD is not None:
                terms_TD = platform.reduce_from_group(terms_TD, group, name.format("sum"), dtype)
            y_TD = _added(terms_TD, complete_TD)
        else:
            if terms_TD is not None:
                name = name.format("reduce-scatter")
                shared = platform.scatter_tokens(terms_TD, complete_TD, tokens.splits, group, name, dtype)
            elif complete_TD is not None:
                name = f"moe: all-gather of the output tokens' gradient over {self.axis}"
                shared = platform.split_over_group(complete_TD, tokens.splits, group, name)
            else:
                shared = None
            y_TD = _added(shared, own_SD)
        return self._as_the_caller_wants(y_TD, tokens)

    def _as_the_caller_wants(self, y_TD: Tensor, tokens: Tokens) -> Any:
        shapes, dim = tokens.shapes, self._dim(tokens)
        if self.wanted.is_shard():
            y = y_TD.reshape(shapes[self.mesh.get_local_rank()])
        else:
            y = _from_rank_order(self.platform, y_TD, dim, shapes)
        if self.use_local_output:
            return y
        sizes = [shape[dim] for shape in shapes]
        whole = tuple(sum(sizes) if d == dim else size for d, size in enumerate(shapes[0]))
        if self.wanted.is_shard() and sizes != chunk_sizes(sum(sizes), len(sizes)):
            raise ValueError(
                f"a DTensor {self.wanted} of dim {sum(sizes)} has parts {chunk_sizes(sum(sizes), len(sizes))}, but the "
                f"ranks gave {sizes}; cut tokens as torch.chunk does, or leave use_local_output at True"
            )
        return self.platform.distributed_tokens(y, self.mesh, self.wanted, whole)

    def _dim(self, x: Any) -> int:
        """The dim that is cut, of tokens [..., D]."""
        num_dims = len(x.shapes[0] if isinstance(x, Tokens) else x.shape)
        placement = self.given if isinstance(self.given, Shard) else self.wanted
        assert isinstance(placement, Shard)
        dim = placement.dim + num_dims * (placement.dim < 0)
        if not 0 <= dim < num_dims - 1:
            raise ValueError(
                f"{placement} is no dim of tokens with {num_dims} dims, the last of which is not cut; tokens [T, D] "
                "want Shard(0), and [B, S, D] Shard(0) or Shard(1)"
            )
        return dim

    def _shapes(self, x: Tensor, dim: int, whole_shape: tuple[int, ...] | None) -> list[tuple[int, ...]]:
        """Shape of every rank's tokens."""
        shape, num_ranks = tuple(x.shape), self.mesh.size()
        if num_ranks == 1:
            return [shape]
        if whole_shape is not None or not self.given.is_shard():
            sizes = chunk_sizes((whole_shape or shape)[dim], num_ranks)
        else:
            sizes = self._sizes_of_all(x, dim)
        return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]

    def _sizes_of_all(self, x: Tensor, dim: int) -> list[int]:
        """What each rank holds of the dim; and every rank learns whether all of them mean the same."""
        platform, num_ranks = self.platform, self.mesh.size()
        others = prod(size for d, size in enumerate(x.shape[:-1]) if d != dim)
        mine = platform.int_tensor([x.shape[dim], others] * num_ranks, like=x).reshape((num_ranks, 2))
        arriving = platform.start_counts_exchange(
            described(platform, mine, Sending.of(platform, x, None)),
            self.mesh.get_group(),
            f"moe: all-gather of the numbers of tokens over {self.axis}",
        )
        sizes, of_others = agreed_counts(arriving.to_host()[-1], num_ranks, ranks_of(self.mesh)).T
        if (of_others != of_others[0]).any():
            raise ValueError(
                f"the {self.axis} ranks {self.ranks} hold parts of one sequence and must agree in every dim but "
                f"{dim}, but their other dims hold {np.asarray(of_others).tolist()} tokens"
            )
        return [int(size) for size in sizes]


def _added(*values: Tensor | None) -> Tensor:
    first, *others = (value for value in values if value is not None)
    return sum(others, start=first)


def _in_rank_order(platform: Platform, x: Tensor, dim: int, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """All tokens [..., D] as [T, D], those of rank 0 first."""
    if dim == 0:
        return x.reshape((prod(x.shape[:-1]), x.shape[-1]))
    ends = np.cumsum([shape[dim] for shape in shapes])
    before = (slice(None),) * dim
    parts = [x[(*before, slice(int(end) - shape[dim], int(end)))] for end, shape in zip(ends, shapes) if shape[dim]]
    return platform.concat(
        [part.reshape((prod(part.shape[:-1]), x.shape[-1])) for part in parts] or [x.reshape((0, x.shape[-1]))], 0
    )


def _from_rank_order(platform: Platform, y_TD: Tensor, dim: int, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """The inverse."""
    if dim == 0:
        return y_TD.reshape((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    ends = np.cumsum([prod(shape[:-1]) for shape in shapes])
    parts = [
        y_TD[int(end) - prod(shape[:-1]) : int(end)].reshape(shape)
        for end, shape in zip(ends, shapes)
        if prod(shape[:-1])
    ]
    return platform.concat(parts, dim) if parts else y_TD.reshape(shapes[0])
