"""What a parallel style is, and the ways to apply styles to modules."""

import dataclasses
import difflib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, TypeVar

from hyper_parallel.core.types import Mesh, Module, SameModule
from hyper_parallel.platform import get_platform, imported_platforms

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

__all__ = ["ParallelStyle", "parallelize_module", "parallelize"]

Class = TypeVar("Class", bound=type)


class Style(Protocol):
    """What a plan may name: our styles, and torch's own on torch."""

    def _apply(self, module: Module, device_mesh: Any) -> Any: ...


Plan: TypeAlias = Style | Mapping[str, Style]


class ParallelStyle(ABC):
    """How one module is sharded and called over a mesh.

    A style holds no state of a module or a call: one object may be applied to many modules.
    On torch a style also works through ``torch.distributed.tensor.parallel.parallelize_module``.
    """

    mesh_dim_names: tuple[str, ...]

    def __init__(self) -> None:
        # Loading a platform makes torch's own parallelize_module accept our styles.
        imported_platforms()

    @abstractmethod
    def validate(self, module: Module, device_mesh: Mesh) -> None:
        """Raise if ``apply`` would; changes nothing."""

    @abstractmethod
    def apply(self, module: SameModule, device_mesh: Mesh) -> SameModule:
        """Validate, then shard ``module`` in place; returns the module."""

    def _apply(self, module: SameModule, device_mesh: Mesh) -> SameModule:
        """The name under which torch's ``parallelize_module`` calls a style."""
        return self.apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def parallelize_module(module: SameModule, device_mesh: Mesh, plan: Plan) -> SameModule:
    """Apply a style to a module, or styles to the modules inside it that a plan names.

    Everything is validated before the first module is changed.

    Args:
        module: a ``torch.nn.Module`` or ``mindspore.nn.Cell``; changed in place.
        device_mesh: the mesh. A style for fewer axes gets its slice of it: beside ``ExpertTensorParallel`` on a mesh
            ``("ep", "tp")``, ``TensorParallel`` gets ``mesh["tp"]``. Styles of torch itself get ``mesh["tp"]``.
        plan: a style, or ``{pattern: style}``. A pattern is a dotted module name in which each part may use the
            wildcards ``*``, ``?`` and ``[...]``: ``"layers.*.moe.experts"``; ``""`` is the module itself.

    Returns:
        ``module``.

    Raises:
        ValueError: a pattern matches nothing (the message lists near names), or what a style's ``apply`` raises.
        TypeError: ``plan`` is neither a style nor a dict of styles.
        RuntimeError: a module is named twice, or already parallelised.
    """
    platform = get_platform(module)
    steps = [
        (name, target, style, _mesh_for(style, device_mesh)) for name, target, style in _resolve(platform, module, plan)
    ]
    named_twice = {name for name, *_ in steps if sum(name == other for other, *_ in steps) > 1}
    if named_twice:
        raise RuntimeError(f"the plan names these modules more than once: {sorted(named_twice)}")
    for name, target, style, mesh in steps:
        if isinstance(style, ParallelStyle):
            _validate_named(style, name, target, mesh)
    _check_not_shared(platform, module, [target for _, target, *_ in steps])
    for name, target, style, mesh in steps:
        style._apply(target, mesh)
        sharded = platform.sharded(target)
        if name and sharded is not None:
            platform.wrap_forward(target, dataclasses.replace(sharded, name=name))()
    return module


def parallelize(plan: Plan, device_mesh: Mesh | Callable[[], Mesh]) -> Callable[[Class], Class]:
    """Class decorator: every object of the class is parallelised at the end of its construction.

    A subclass of the decorated class is parallelised only if it is decorated itself.

    Args:
        plan: as in :func:`parallelize_module`.
        device_mesh: a mesh, or a callable without arguments that returns it, asked at each construction.
    """

    def decorate(cls: Class) -> Class:
        construct = cls.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            if type(self) is cls:
                parallelize_module(self, device_mesh() if callable(device_mesh) else device_mesh, plan)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def _check_not_shared(platform: "Platform", module: Module, targets: list[Module]) -> None:
    """Raise ``ValueError`` if a parameter that is about to be replaced belongs to another module too: the two would
    silently come apart."""
    owners: dict[int, list[str]] = {}
    inside = {id(child) for target in targets for _, child in platform.named_modules(target)}
    cut: set[int] = set()
    for path, child in platform.named_modules(module):
        for name, parameter in platform.parameters(child).items():
            owners.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
            if id(child) in inside:
                cut.add(id(parameter))
    shared = [names for key, names in owners.items() if key in cut and len(names) > 1]
    if shared:
        raise ValueError(
            f"{' and '.join(map(repr, shared[0]))} are one parameter, which sharding would tear apart; use one module "
            "in both places, or give each its own weights"
        )


def _is_style(value: Any) -> TypeGuard[Style]:
    if isinstance(value, type):
        return False
    return isinstance(value, ParallelStyle) or callable(getattr(value, "_apply", None))


def _resolve(platform: "Platform", module: Module, plan: Plan) -> list[tuple[str, Module, Style]]:
    """List (name, module, style) for every module that the plan names, in the plan's order."""
    if _is_style(plan):
        return [("", module, plan)]
    if not isinstance(plan, dict) or not all(isinstance(k, str) and _is_style(v) for k, v in plan.items()):
        classes = [value for value in (plan.values() if isinstance(plan, dict) else [plan]) if isinstance(value, type)]
        advice = f"; write {classes[0].__name__}() for an object of the class" if classes else ""
        raise TypeError(f"expected a parallel style or a dict of name pattern to style, got {plan!r}{advice}")
    modules = dict(platform.named_modules(module))
    found = []
    for pattern, style in plan.items():
        matches = [name for name in modules if _matches(name, pattern)]
        if not matches:
            near = difflib.get_close_matches(pattern, modules, n=5, cutoff=0.3) or sorted(modules)[:5]
            raise ValueError(f"plan pattern {pattern!r} matches no module; near names: {', '.join(map(repr, near))}")
        found += [(name, modules[name], style) for name in matches]
    return found


def _matches(name: str, pattern: str) -> bool:
    if not name:  # the module itself, which no wildcard stands for
        return not pattern
    name_parts, pattern_parts = name.split("."), pattern.split(".")
    return len(name_parts) == len(pattern_parts) and all(map(fnmatchcase, name_parts, pattern_parts))


def _mesh_for(style: Style, device_mesh: Mesh) -> Mesh:
    """The mesh itself, or the slice for a style that needs fewer of its axes."""
    have = tuple(getattr(device_mesh, "mesh_dim_names", None) or ())
    want = getattr(style, "mesh_dim_names", ("tp",))
    fewer = len(want) < len(have) == 2
    return device_mesh[want[0]] if fewer and len(want) == 1 and want[0] in have else device_mesh


def _validate_named(style: ParallelStyle, name: str, target: Module, mesh: Mesh) -> None:
    try:
        style.validate(target, mesh)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"module {name!r}: {error}" if name else str(error)) from error
