"""Which implementations run: those for the device of a tensor. Decided here and nowhere else.

A device without a room of its own is served by the portable ones. What runs in detail on an Ascend device is logged.
"""

from types import ModuleType

from hyper_parallel.platform.torch import experts as portable_experts
from hyper_parallel.platform.torch import npu_experts, npu_routing, npu_rows
from hyper_parallel.platform.torch import routing as portable_routing
from hyper_parallel.platform.torch import rows as portable_rows

__all__ = ["experts", "routing", "rows"]


def rows(x) -> ModuleType:
    """The module with the names of ``rows`` that serves the device of x."""
    return npu_rows if x.device.type == "npu" else portable_rows


def experts(x) -> ModuleType:
    """The module with the names of ``experts`` that serves the device of x."""
    return npu_experts if x.device.type == "npu" else portable_experts


def routing(x) -> ModuleType:
    """The module with the names of ``routing`` that serves the device of x."""
    return npu_routing if x.device.type == "npu" else portable_routing
