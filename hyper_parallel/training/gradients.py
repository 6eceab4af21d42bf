"""Gradients of a whole model between backward and the optimizer's step, by placements alone."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hyper_parallel.core.types import Mesh, Module, Tensor
from hyper_parallel.platform import get_platform
from hyper_parallel.training.span import Span, listed, platform_of, sharded_groups

__all__ = ["reduce_gradients", "clip_grad_norm_", "all_finite", "parameter_groups", "buckets"]

BUCKET_BYTES = 64 * 2**20


def reduce_gradients(
    parameters: Iterable[Tensor] | Tensor,
    mesh: Mesh,
    grads: Sequence[Tensor] | None = None,
    op: str = "sum",
) -> tuple[Tensor, ...] | None:
    """Make every gradient that of the loss of all ranks.

    Each gradient is summed over every axis of ``mesh`` over which its parameter is not sharded: those of dense
    parameters over all of them, those of experts over dp but not over ep, where their rows came from anyway. The rule
    reads placements and ranks; a dense parameter cut over tp is summed like any other. A gradient whose placements
    differ from its parameter's (torch: ``Partial``) is brought to them first.

    Gradients travel in few collectives of at most 64 MiB (a larger gradient in one of its own), by dtype and by ranks,
    in the order of ``parameters``. Every rank of the mesh, and of its other slices, calls this with the same
    parameters. What FSDP2 has reduced is sharded over its axis and is left alone there; a parameter that it replicates
    over another axis (hybrid sharding) is reduced by it too, so leave that axis out of ``mesh``.

    Args:
        parameters: all parameters of the model, those of experts too; frozen ones are skipped.
        mesh: the axes whose ranks see different tokens: ``mesh["dp", "ep"]``. The ranks of tp see the same ones.
        grads: MindSpore: the gradients of ``value_and_grad``, one per parameter. torch: leave out.
        op: "sum", for losses divided by the number of tokens of all ranks; "mean", for losses that are means of
            equally many tokens: every gradient is divided by the number of ranks of ``mesh``, experts' too.

    Returns:
        torch: None; every ``.grad`` is changed in place. A parameter without gradient on all ranks stays so; one
        without gradient on some ranks counts as zeros there. MindSpore: the new gradients.

    Raises:
        ValueError: on every rank, if the ranks gave different parameters; an axis of ``mesh`` joins ranks with the
            same and with other parts of a parameter; sparse gradients. TypeError: ``grads`` is given on torch or
            missing on MindSpore.
    """
    if op not in ("sum", "mean"):
        raise ValueError(f'op must be "sum" or "mean", got {op!r}')
    parameters = listed(parameters)
    platform = platform_of(parameters, mesh)
    verbs, span = platform.gradients(), Span.of(platform, mesh)
    local = verbs.local_gradients(parameters, grads)
    wanted = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    axes_of = {i: span.axes_to_sum(parameters[i]) for i in wanted}
    if span.axes:
        for i in _missing_here(span, [parameters[i] for i in wanted], [local[i] for i in wanted], axes_of.values()):
            local[wanted[i]] = verbs.zero_gradient(parameters[wanted[i]])
    divisor = span.size if op == "mean" else 1
    present = [i for i in wanted if local[i] is not None]
    for axes, indices in buckets([(axes_of[i], i, local[i]) for i in present]):
        group = span.group(axes) if axes else None
        name = f"reduce_gradients: sum of {len(indices)} gradients"
        for i, summed in zip(indices, verbs.sum_flat([local[i] for i in indices], group, divisor, name)):
            local[i] = summed
    return verbs.with_gradients(local)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    grads: Sequence[Tensor] | None = None,
) -> Tensor | tuple[tuple[Tensor, ...], Tensor]:
    """Scale all gradients so that the norm of the whole model's gradient is at most ``max_norm``.

    The norm is that of one device: every element of the model counts once, whichever rank holds it, and each axis over
    which parameters are sharded costs one collective of a few scalars. Call it on every rank, after
    :func:`reduce_gradients`; all ranks get the same norm. Arguments and formula are those of
    ``torch.nn.utils.clip_grad_norm_``: gradients times ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        parameters: all parameters of the model.
        max_norm: the largest norm.
        norm_type: p of the norm, greater than 0, or infinity.
        error_if_nonfinite: raise ``RuntimeError``, on all ranks, if the norm is infinite or NaN; the host waits for it.
        foreach: torch: whether local norms use its multi-tensor form; None lets torch choose.
        grads: MindSpore: the gradients, one per parameter. torch: leave out.

    Returns:
        torch: the norm before clipping, a plain tensor; ``.grad`` is changed in place.
        MindSpore: (the new gradients, the norm).
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be greater than 0, or infinity, got {norm_type}")
    parameters = listed(parameters)
    verbs = platform_of(parameters).gradients()
    local = verbs.local_gradients(parameters, grads)
    norm = _norm(verbs, parameters, local, norm_type, foreach)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same"
        )
    clipped = verbs.clipped(local, norm, float(max_norm))
    changed = verbs.with_gradients(clipped)
    return norm if changed is None else (changed, norm)


def all_finite(
    parameters: Iterable[Tensor] | Tensor, grads: Sequence[Tensor] | None = None, mesh: Mesh | None = None
) -> bool:
    """Whether no gradient of the model is infinite or NaN: one answer, the same on all ranks.

    The ranks that share out a parameter always agree. Before :func:`reduce_gradients` replicas differ as well: give
    ``mesh``, the axes over which they lie. The host waits for the answer.

    Args:
        parameters: all parameters of the model.
        grads: MindSpore: the gradients, one per parameter. torch: leave out.
        mesh: further axes to agree over, such as ``mesh["dp", "ep"]``, or the whole mesh.
    """
    parameters = listed(parameters)
    platform = platform_of(parameters, mesh)
    verbs = platform.gradients()
    local = verbs.local_gradients(parameters, grads)
    groups = {}
    if mesh is not None:
        span = Span.of(platform, mesh)
        groups = {span.along((axis,)): (span.group((axis,)), mesh.device_type) for axis in span.axes}
    for parameter in parameters:
        for ranks, group in sharded_groups(verbs, parameter).items():
            groups.setdefault(ranks, (group, parameter.device_mesh.device_type))
    worst = [int(not verbs.finite([gradient for gradient in local if gradient is not None]))]
    for group, device_type in groups.values():
        worst = verbs.largest(worst, group, device_type, "all_finite: agreement of the ranks")
    return not worst[0]


def parameter_groups(module: Module) -> list[dict[str, Any]]:
    """The trainable parameters of a module as an optimizer's groups, one for each mesh they are laid out over.

    torch's multi-tensor operators (``foreach=True``, ``fused=True``) take plain tensors or DTensors of one mesh, not
    both: ``AdamW(parameter_groups(model), fused=True)``. On MindSpore, whose shards are plain parameters, the groups
    are not needed and do no harm.
    """
    found: dict[Any, list[Tensor]] = {}
    for _, parameter in get_platform(module).gradients().trainable(module):
        mesh = getattr(parameter, "device_mesh", None)
        key = None if mesh is None else (mesh.mesh_dim_names, str(mesh.mesh.tolist()))
        found.setdefault(key, []).append(parameter)
    return [{"params": parameters} for parameters in found.values()]


def buckets(entries: Iterable[tuple[Any, int, Any]], limit: int = BUCKET_BYTES) -> Iterator[tuple[Any, list[int]]]:
    """Yield (key, indices) for ``entries`` of (key, index, tensor), such that a bucket has one key and one dtype and at
    most ``limit`` bytes, or one tensor."""
    waiting: dict[Any, tuple[int, list[int]]] = {}
    for key, index, tensor in entries:
        kind = key, tensor.dtype
        size, indices = waiting.pop(kind, (0, []))
        if indices and size + tensor.nbytes > limit:
            yield key, indices
            size, indices = 0, []
        waiting[kind] = size + tensor.nbytes, [*indices, index]
    for (key, _), (_, indices) in waiting.items():
        yield key, indices


def _norm(verbs: Any, parameters: list[Any], local: list[Any], norm_type: float, foreach: bool | None) -> Any:
    """The norm of all gradients, each element counted once."""
    kinds: dict[tuple, list] = {}
    groups: dict[tuple, Any] = {}
    for parameter, gradient in zip(parameters, local):
        if not parameter.requires_grad and gradient is None:
            continue
        cut = sharded_groups(verbs, parameter)
        groups.update(cut)
        # Also of a gradient that is missing here: another rank's part of it may be there, and waits for this one.
        kinds.setdefault(tuple(sorted(cut)), []).append((parameter, gradient))
    names = list(kinds)
    powers = [verbs.powers(kinds[name], norm_type, foreach) for name in names]
    for ranks, group in groups.items():
        among = [i for i, name in enumerate(names) if ranks in name]
        what = "clip_grad_norm_: norms of shards"
        combined = verbs.combine_scalars([powers[i] for i in among], group, math.isinf(norm_type), what)
        for i, power in zip(among, combined):
            powers[i] = power
    return verbs.total_norm(powers, norm_type)


def _missing_here(span: Span, parameters: list[Any], local: list[Any], axes: Iterable[Any]) -> list[int]:
    """Positions of gradients that are missing on this rank and present on another; every rank learns of differences."""
    group, device_type = span.group(span.axes), span.mesh.device_type
    shapes = [(tuple(parameter.shape), str(parameter.dtype), at) for parameter, at in zip(parameters, axes)]
    digest = len(shapes), zlib.crc32(repr(shapes).encode())
    absent = int(any(gradient is None for gradient in local))
    largest = [*digest, *(-number for number in digest), absent]
    *ends, absent = span.verbs.largest(largest, group, device_type, "reduce_gradients: comparison of the parameters")
    if ends[:2] != [-number for number in ends[2:]]:
        raise ValueError(
            f"reduce_gradients: the ranks {list(span.along(span.axes))} gave different parameters (this one "
            f"{len(shapes)} that require a gradient); give all parameters, in the same order, on every rank"
        )
    if not absent:
        return []
    here = [int(gradient is not None) for gradient in local]
    anywhere = span.verbs.largest(here, group, device_type, "reduce_gradients: which gradients there are")
    return [i for i, (mine, someones) in enumerate(zip(here, anywhere)) if someones and not mine]
