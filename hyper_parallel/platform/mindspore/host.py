"""Integers between device and host, with as few copies as can be."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore import device

__all__ = ["dtype_name", "int_tensor", "made_by_host", "on_host", "to_host"]

# Attribute of a tensor that was made from host values: they need not be copied back to be read.
HOST_VALUES = "_hyper_parallel_host_values"


def dtype_name(value):
    """The dtype of a tensor, or a dtype, in lower case."""
    dtype = getattr(value, "dtype", value)
    return str(dtype).lower() if isinstance(dtype, ms.dtype.Type) else type(value).__name__


def on_host(tensor):
    """Whether reading the values costs no copy from a device."""
    return not device.on_ascend() or made_by_host(tensor)


def made_by_host(tensor):
    """Whether :func:`int_tensor` made the tensor."""
    return hasattr(tensor, HOST_VALUES)


def to_host(*tensors):
    """Values of 1-D integer tensors as lists of ints: one copy for all that the host does not know."""
    known = [getattr(tensor, HOST_VALUES, None) for tensor in tensors]
    copied = [tensor.astype(ms.int64) for tensor, values in zip(tensors, known) if values is None]
    ends = np.cumsum([tensor.shape[0] for tensor in copied])[:-1]
    pieces = iter(np.split(mint.cat(copied).asnumpy(), ends) if copied else ())
    return [(next(pieces) if values is None else values).tolist() for values in known]


def int_tensor(values):
    """An int64 tensor of host values, which remembers them."""
    values = np.asarray(values, np.int64)
    tensor = Tensor(values)
    setattr(tensor, HOST_VALUES, values)
    return tensor
