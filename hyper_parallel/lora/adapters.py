"""Putting adapters on the experts of a model, and merging them into the weights."""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hyper_parallel.checkpoint.rooms import room_of
from hyper_parallel.core.expert_parallel.agreement import check_same
from hyper_parallel.core.expert_parallel.checks import ExpertShapes
from hyper_parallel.core.expert_parallel.lora import Adapter, Lora, Weight
from hyper_parallel.core.expert_parallel.packed import FIRST_WEIGHTS, PackedShapes
from hyper_parallel.core.types import Module
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Platform

__all__ = ["Adapted", "adapted", "add_adapters", "full_names", "merge_adapters", "planned", "put_on"]

# So begins what PEFT and this library call the parameters of adapters, or the modules that hold them.
PREFIX = ".lora_"


def add_adapters(model: Module, r: int, alpha: float, target_parameters: Iterable[str] | None = None) -> list[str]:
    """Put LoRA adapters on the experts of a model, and freeze everything else.

    Every expert's weight W becomes ``W + alpha / r * B A``, with A [E, r, in] drawn from U(-1/sqrt(in), 1/sqrt(in))
    and B zeros, so that the model first computes what it did. They are parameters ``lora_A_NAME`` and ``lora_B_NAME``
    beside the weight NAME, laid out over its mesh, in its dtype, but fp32 beside 16-bit weights. Gradients are complete
    on every rank, as those of the weights are; ``reduce_gradients``, ``clip_grad_norm_`` and checkpoints treat them by
    their placements.

    Call it on every rank, after the style was applied and the weights were loaded, and before FSDP2 and the optimizer.
    The draw of the first rank of the style's mesh is laid out, as that of weights; replicas along dp need the same
    seed, or ``synchronize_parameters(model, mesh, "broadcast")``.

    Args:
        model: a model, or an experts module, to which a style of experts was applied.
        r: rank of the factors.
        alpha: strength; the product of the factors counts ``alpha / r`` times.
        target_parameters: names of weights, or their last parts, as PEFT takes them: ``["experts.down_proj"]``. By
            default all weights of all experts. Biases have no adapters.

    Returns:
        Full names of the adapted weights. Other parameters have ``requires_grad = False``, but for those that are named
        ``lora_...``, which may be PEFT's; set it again for what should learn besides, such as a router.

    Raises:
        ValueError: no sharded experts; an ``r`` or ``alpha`` that no adapter has; a target that matches nothing;
            weights on meta, or laid out otherwise than the style did it; on all ranks, other adapters on some of them.
            RuntimeError: a second call. After an error the model is as it was.
    """
    platform = get_platform(model)
    made = planned(platform, model, r, alpha, target_parameters)
    already = [each.path for each in made if each.sharded.lora is not None]
    if already:
        raise RuntimeError(f"{already[0] or 'the module'} has adapters already; merge_adapters(model) takes them off")
    put_on(platform, model, made)
    return full_names(made)


def merge_adapters(model: Module) -> list[str]:
    """Add every adapter's ``alpha / r * B A`` to its weight, and take the adapters off.

    Each rank changes its own shards, one weight after the other, and sends nothing. The model then computes what it
    did, apart from rounding, and is saved as any other; its weights stay frozen.

    Returns:
        Full names of the weights that were changed.

    Raises:
        ValueError: the model has no adapters, or its weights lie otherwise than the style laid them out.
    """
    platform = get_platform(model)
    verbs, found = platform.gradients(), adapted(platform, model)
    room_of(model).settle(model)
    for each in found:
        own = platform.parameters(each.module)
        for name in each.lora.adapters:
            _check_lies(
                platform, each.sharded, name, own.get(name), "load them into a model without it and merge there"
            )
    for each in found:
        own = platform.parameters(each.module)
        for name, adapter in each.lora.adapters.items():
            keys = name, *adapter.names
            values = dict(zip(keys, verbs.local_values([own[key] for key in keys])))
            verbs.set_local_value(own[name], each.lora.merged(platform, name, values))
            for factor in adapter.names:
                delattr(each.module, factor)
        platform.wrap_forward(each.module, replace(each.sharded, lora=None))()
    return full_names(found)


class Adapted(NamedTuple):
    """A module that has, or is about to have, adapters.

    Attributes:
        path: its dotted name in the model. sharded: what the style put on it.
    """

    path: str
    module: Module
    sharded: Any
    lora: Lora


def adapted(platform: Platform, model: Module) -> list[Adapted]:
    """The modules of a model with adapters.

    Raises:
        ValueError: there is none.
    """
    found = [Adapted(*each, each[2].lora) for each in _sharded_experts(platform, model) if each[2].lora is not None]
    if not found:
        raise ValueError("the model has no adapters; add_adapters(model, r, alpha) puts them on its experts")
    return found


def planned(
    platform: Platform, model: Module, r: int, alpha: float, target_parameters: Iterable[str] | None
) -> list[Adapted]:
    """What :func:`add_adapters` would put on; it changes nothing, and raises what that documents."""
    if isinstance(r, bool) or not isinstance(r, int) or r <= 0:
        raise ValueError(f"r must be a positive int, the rank of the adapters, got {r!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha!r}")
    found = _sharded_experts(platform, model)
    if not found:
        raise ValueError(
            "no experts to adapt: no style was applied to any experts in this model. Apply ExpertTensorParallel, "
            "ExpertParallel or TensorParallel first; one device is a mesh of one rank"
        )
    chosen = _chosen(found, None if target_parameters is None else list(target_parameters))
    made = [
        Adapted(path, mod, sharded, _lora_of(platform, mod, sharded, names, r, alpha))
        for path, mod, sharded, names in chosen
    ]
    names = full_names(made)
    mine = {"r": r, "alpha": zlib.crc32(repr(float(alpha)).encode()), "weights": zlib.crc32(repr(names).encode())}
    own = {"alpha": str(alpha), "weights": ", ".join(names)}
    must = "adapters: all ranks of the mesh must have the same ones"
    for mesh in {id(each.sharded.device_mesh): each.sharded.device_mesh for each in made}.values():
        check_same(platform, mine, own, mesh, must, "adapters: agreement on them")
    return made


def put_on(platform: Platform, model: Module, made: Sequence[Adapted]) -> None:
    """Make the parameters of what was planned, and freeze the others."""
    for path, child in platform.named_modules(model):
        for name, parameter in platform.parameters(child).items():
            if parameter is not None and PREFIX not in f".{path}.{name}":
                parameter.requires_grad = False
    for each in made:
        for adapter in each.lora.adapters.values():
            _add(platform, each.module, each.sharded.device_mesh, adapter)
        platform.wrap_forward(each.module, replace(each.sharded, lora=each.lora))()


def full_names(made: Sequence[Adapted]) -> list[str]:
    """Of the adapted weights."""
    return [_joined(each.path, name) for each in made for name in each.lora.adapters]


def _sharded_experts(platform: Platform, model: Module) -> list[tuple[str, Module, Any]]:
    if not platform.is_module(model):
        raise TypeError(f"expected a {platform.name} module, got {type(model).__qualname__}")
    modules = ((path, mod, platform.sharded(mod)) for path, mod in platform.named_modules(model))
    return [(path, mod, s) for path, mod, s in modules if isinstance(getattr(s, "shapes", None), ExpertShapes)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _weights(shapes: ExpertShapes) -> dict[str, Weight]:
    """The weights that can have an adapter, by name."""
    if isinstance(shapes, PackedShapes):
        return {
            name: (cut.laid_out, cut.hidden, name == "down_proj")
            for name, cut in shapes.cuts.items()
            if cut.hidden is not None and name in (*FIRST_WEIGHTS, "down_proj")
        }
    wide = (shapes.num_experts, shapes.hidden_dim, shapes.dim), 1, False
    return {"w1": wide, "w2": ((shapes.num_experts, shapes.dim, shapes.hidden_dim), 2, True), "w3": wide}


def _chosen(found: list, targets: list[str] | None) -> list[tuple[str, Module, Any, list[str]]]:
    """The modules with at least one target, and the names of their targets."""
    available = {_joined(path, name): (path, name) for path, _, sharded in found for name in _weights(sharded.shapes)}
    wanted = set(available.values())
    if targets is not None:
        matched = {target: {full for full in available if f".{full}".endswith(f".{target}")} for target in targets}
        unknown = [target for target, names in matched.items() if not names]
        if unknown or not targets:
            raise ValueError(
                f"target_parameters {unknown or targets} match no weight of experts under a style; there are "
                f"{', '.join(list(available)[:8])}{' ...' if len(available) > 8 else ''}; write one of them, or its end"
            )
        wanted = {available[full] for names in matched.values() for full in names}
    named = [(path, mod, s, [name for name in _weights(s.shapes) if (path, name) in wanted]) for path, mod, s in found]
    return [each for each in named if each[3]]


def _lora_of(platform: Platform, mod: Module, sharded: Any, names: list[str], r: int, alpha: float) -> Lora:
    """The adapters of one module, checked, before anything is changed."""
    own, weights = platform.parameters(mod), _weights(sharded.shapes)
    adapters = {}
    for name in (name for name in own if name in names):  # in the module's order, which PEFT's names follow
        weight = own[name]
        _check_lies(platform, sharded, name, weight, "add adapters before it, right after the weights were loaded")
        if not platform.same_device(platform.local(weight), platform.local(weight)):
            raise ValueError(f"{sharded.name}: {name} is on meta; call to_empty(device=...) and load the weights first")
        adapters[name] = Adapter.of(name, weights[name], weight.placements, r)
    missing = [name for name in names if name not in adapters]
    if missing:
        raise ValueError(
            f"{sharded.name}: {missing} are no parameters of the module any more; add adapters before parametrizations"
        )
    on_rows = _computes_swiglu(platform, mod, sharded.shapes)
    if not on_rows and platform.packed_experts() is None:
        raise ValueError(
            f"{sharded.name}: on {platform.name} adapters go on GroupedExperts; what the forward of "
            f"{type(mod).__mro__[1].__name__} computes is not known"
        )
    return Lora(r, alpha, adapters, on_rows)


def _check_lies(platform: Platform, sharded: Any, name: str, weight: Any, remedy: str) -> None:
    if not platform.is_sharded(weight) or len(weight.placements) != sharded.device_mesh.ndim:
        raise ValueError(
            f"{sharded.name}: {name} no longer lies as {sharded.label} laid it out, as after fully_shard; {remedy}"
        )


def _computes_swiglu(platform: Platform, mod: Module, shapes: ExpertShapes) -> bool:
    """Whether the module's own forward is SwiGLU and nothing else."""
    if isinstance(shapes, PackedShapes):
        return shapes.swiglu
    ours, own = platform.public_object("GroupedExperts"), type(mod).__mro__[1]
    return issubclass(own, ours) and all(
        getattr(own, name, None) is getattr(ours, name, None) for name in ("forward", "construct", "run")
    )


def _add(platform: Platform, mod: Module, mesh: Any, adapter: Adapter) -> None:
    like = platform.parameters(mod)[adapter.weight]
    (name_a, name_b), bound = adapter.names, 1 / math.sqrt(adapter.shape_a[2])
    platform.add_parameter(mod, name_a, adapter.shape_a, bound, like, mesh, adapter.placements_a)
    platform.add_parameter(mod, name_b, adapter.shape_b, 0.0, like, mesh, adapter.placements_b)
