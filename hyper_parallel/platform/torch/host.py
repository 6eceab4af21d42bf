"""Integers between device and host, with as few copies as can be."""

import numpy as np
import torch

__all__ = ["dtype_name", "int_tensor", "int_tensors", "made_by_host", "on_host", "to_host"]

# Attribute of a tensor that was made from host values: they need not be copied back to be read.
HOST_VALUES = "_hyper_parallel_host_values"


def dtype_name(value):
    """The dtype of a tensor, or a dtype, without the framework's name in front."""
    dtype = getattr(value, "dtype", value)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else type(value).__name__


def on_host(tensor):
    """Whether reading the values costs no copy from a device."""
    return tensor.device.type == "cpu" or made_by_host(tensor)


def made_by_host(tensor):
    """Whether :func:`int_tensor` made the tensor."""
    return hasattr(tensor, HOST_VALUES)


def to_host(*tensors):
    """Values of 1-D integer tensors as lists of ints: one copy for all that the host does not know."""
    known = [getattr(tensor, HOST_VALUES, None) for tensor in tensors]
    copied = [tensor.to(torch.int64) for tensor, values in zip(tensors, known) if values is None]
    sizes = [len(tensor) for tensor in copied]
    pieces = iter(np.split(torch.cat(copied).cpu().numpy(), np.cumsum(sizes)[:-1]) if copied else ())
    return [(next(pieces) if values is None else values).tolist() for values in known]


def int_tensor(values, like):
    """An int64 tensor of host values on the device of ``like``, which remembers them."""
    return int_tensors([values], like)[0]


def int_tensors(arrays, like):
    """Several such tensors, in one copy. It is from pinned memory, for the host would wait for any other."""
    arrays = [np.asarray(values, np.int64) for values in arrays]
    uploaded = torch.as_tensor(np.concatenate(arrays))
    if like.device.type not in ("cpu", "meta"):
        uploaded = uploaded.pin_memory().to(like.device, non_blocking=True)
    tensors = uploaded.split([len(values) for values in arrays])
    for tensor, values in zip(tensors, arrays):
        setattr(tensor, HOST_VALUES, values)
    return tensors
