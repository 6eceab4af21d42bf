"""MindSpore in PyNative mode: CPU ranks over MindSpore's own backend ``mccl``.

What an Ascend device does differently has its place beside ``cpu_collectives``: the same functions over HCCL.
"""

from hyper_parallel.platform.mindspore.layout import from_layout, to_layout
from hyper_parallel.platform.mindspore.platform import MindSporePlatform

__all__ = ["PLATFORM", "from_layout", "to_layout"]

PLATFORM = MindSporePlatform()
