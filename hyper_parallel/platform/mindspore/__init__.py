"""MindSpore in PyNative mode: CPU ranks over MindSpore's own backend ``mccl``, Ascend devices over HCCL.

What differs between the two is in rooms of two names, such as ``rows`` and ``ascend_rows``; ``device`` chooses.
"""

from pathlib import Path

from hyper_parallel.platform.mindspore import compat, sharding
from hyper_parallel.platform.mindspore.layout import from_layout, to_layout
from hyper_parallel.platform.mindspore.platform import MindSporePlatform

__all__ = ["PLATFORM", "from_layout", "to_layout"]

PLATFORM = MindSporePlatform()

# The bytecode mode of ms.jit runs what it does not capture, and this library is not for capturing.
compat.leave_out_of_capture(str(Path(__file__).parents[2]))

# MindSpore's own words for a whole checkpoint that is loaded into shards lead away from the cause, and come when other
# parameters are loaded already.
compat.check_before_loading(sharding.check_loading)
