"""The platform's room for checkpoints: ``platform/<name>/state.py``, which every platform has with the same names."""

import importlib
from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["room_of"]


def room_of(module: Any) -> Any:
    """The ``state`` of the framework that a module belongs to. Raises TypeError for something that is no module."""
    platform = get_platform(module)
    if not platform.is_module(module):
        raise TypeError(f"expected a module of {platform.name}, got {type(module).__qualname__}")
    return importlib.import_module(f"hyper_parallel.platform.{platform.name}.state")
