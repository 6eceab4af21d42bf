"""Choosing the framework to work with.

A platform is chosen, in this order, by the object at hand; by :func:`set_platform`; by the environment variable
``HYPER_PARALLEL_PLATFORM``; by the one framework that is already imported; by what is installed, MindSpore first.
Both frameworks can live in one process. A framework is imported only when it is chosen.
"""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

__all__ = ["get_platform", "set_platform", "imported_platforms"]

NAMES = ("mindspore", "torch")
VARIABLE = "HYPER_PARALLEL_PLATFORM"

_loaded: "dict[str, Platform]" = {}
_chosen: str | None = None


def get_platform(obj: Any = None) -> "Platform":
    """Return the platform to use.

    Args:
        obj: a module, tensor or mesh; the answer is then the platform that it belongs to. Without it, the answer
            follows the order given at the top of this file.

    Raises:
        TypeError: ``obj`` belongs to no platform.
        ValueError: ``HYPER_PARALLEL_PLATFORM`` holds an unknown name.
        ImportError: no framework is installed.
    """
    if obj is not None:
        return _owner(obj)
    if _chosen is not None:
        return _load(_chosen)
    from_environment = os.environ.get(VARIABLE)
    if from_environment:
        return _load(_checked(from_environment, f"the environment variable {VARIABLE}"))
    imported = [name for name in NAMES if name in sys.modules]
    if len(imported) == 1:
        return _load(imported[0])
    for name in NAMES:
        if importlib.util.find_spec(name) is not None:
            return _load(name)
    raise ImportError("neither mindspore nor torch is installed; install hyper_parallel[mindspore] or [torch]")


def set_platform(name: str | None) -> None:
    """Use the platform ``name`` ("mindspore" or "torch") wherever no object says which; None undoes the choice.

    Raises:
        ValueError: unknown name.
        ImportError: the framework is not installed.
    """
    global _chosen
    if name is None:
        _chosen = None
        return
    _load(_checked(name, "set_platform"))
    _chosen = name


def imported_platforms() -> "list[Platform]":
    """Platforms of the frameworks that this process has already imported; imports none."""
    return [_load(name) for name in NAMES if name in sys.modules and sys.modules[name] is not None]


def _owner(obj: Any) -> "Platform":
    for platform in imported_platforms():
        if platform.owns(obj):
            return platform
    raise TypeError(
        f"expected a module, tensor or mesh of {' or '.join(NAMES)}, got {type(obj).__module__}."
        f"{type(obj).__qualname__}"
    )


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"unknown platform {name!r} in {source}; expected one of {', '.join(NAMES)}")
    return name


def _load(name: str) -> "Platform":
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f"{__name__}.{name}").PLATFORM
    return _loaded[name]
