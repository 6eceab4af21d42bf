"""What the library uses of torch that torch does not document. A new release of torch is this one file to look at.

Tried with torch 2.13.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offsets
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "ALL_TO_ALL",
    "StridedShard",
    "all_gather_into_tensor",
    "all_to_all_single",
    "as_dtensor_class",
    "children_of",
    "default_device",
    "default_time_limit",
    "gloo_options",
    "has_hooks",
    "is_compiled",
    "local_shape_and_offsets",
    "never_compiled",
    "parameters_of",
    "profiled",
    "reduce_scatter_tensor",
    "set_time_limit",
    "wait_tensor",
]

# The functional form: its result is a value of its own, which selective checkpointing can keep; that of
# torch.distributed is written into a buffer.
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def all_to_all_single(x, recv_splits, send_splits, group: dist.ProcessGroup):
    """Start to exchange the rows of a contiguous x; read the result through :func:`wait_tensor` only."""
    return ALL_TO_ALL(x, list(recv_splits), list(send_splits), group.group_name)


def all_gather_into_tensor(x, group: dist.ProcessGroup):
    """Start to gather equal parts along the first dim; read the result through :func:`wait_tensor` only."""
    return torch.ops._c10d_functional.all_gather_into_tensor.default(x, group.size(), group.group_name)


def reduce_scatter_tensor(x, group: dist.ProcessGroup):
    """Start to sum x over the group, and to hand out equal parts; read the result through :func:`wait_tensor` only."""
    return torch.ops._c10d_functional.reduce_scatter_tensor.default(x, "sum", group.size(), group.group_name)


def profiled(name: str):
    """A block that shows in a profiler's trace under ``name``. Unlike the documented record_function it is no operator,
    which selective checkpointing would see."""
    return torch._C._profiler._RecordFunctionFast(name)


def wait_tensor(x):
    """What a started collective gives, complete."""
    return torch.ops._c10d_functional.wait_tensor.default(x)


def never_compiled(function):
    """``function``, which torch.compile neither enters nor records, nor anything that it calls."""
    # torch.compiler.disable is the documented name; it imports the compiler, which costs a second at every start.
    return torch._disable_dynamo(function)


def parameters_of(module: nn.Module) -> dict:
    """The dict in which a module keeps its own parameters."""
    return module._parameters


def children_of(module: nn.Module) -> dict:
    """The dict in which a module keeps its own children."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs before or after the module's forward or backward."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, which ties the module's calls to this object."""
    return module._compiled_call_impl is not None


def as_dtensor_class(cls: type, tensor: dt.DTensor) -> dt.DTensor:
    """The same local tensor and layout as an object of a subclass of DTensor, without a gradient."""
    return cls(tensor.to_local(), tensor._spec, requires_grad=False)


def default_device() -> torch.device:
    """The device on which the default group's collectives take tensors."""
    return torch.device(dist.distributed_c10d._get_object_coll_device())


def default_time_limit(device_type: str) -> timedelta:
    """The time limit that the user gave the default group."""
    return dist.group.WORLD._get_backend(torch.device(device_type)).options._timeout


def gloo_options(limit: timedelta):
    """Options for a new group of CPU ranks whose collectives end at the limit, the making of the group included."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    return options


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Have the collectives of a group that exists end at the limit."""
    dist.distributed_c10d._set_pg_timeout(limit, group)
