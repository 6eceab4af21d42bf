"""MindSpore in PyNative mode: CPU ranks over MindSpore's own backend ``mccl``, Ascend devices over HCCL.

What differs between the two is in rooms of two names, such as ``rows`` and ``ascend_rows``; ``device`` chooses.
"""

from hyper_parallel.platform.mindspore.layout import from_layout, to_layout
from hyper_parallel.platform.mindspore.platform import MindSporePlatform

__all__ = ["PLATFORM", "from_layout", "to_layout"]

PLATFORM = MindSporePlatform()
