"""npu tensors seen from the CPU: their memory is host memory, since src/runtime.c allocated it."""

import ctypes

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["on_cpu", "on_meta", "on_npu", "host_view", "npu_tensors", "other_tensors"]


def host_view(tensor):
    """A CPU tensor over the same bytes, with the same sizes and strides."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_cpu(arguments):
    """The arguments of an operator with npu tensors, devices and generators replaced by the CPU's."""
    return tree_map(_on_cpu, arguments)


def on_meta(arguments):
    """The arguments without memory: only sizes, strides and dtypes."""
    return tree_map(_on_meta, arguments)


def on_npu(results, device):
    """CPU results of an operator as npu tensors with the same sizes, strides and values; those on meta without."""
    return tree_map(lambda value: _on_npu(value, device), results)


def npu_tensors(arguments):
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu"]


def other_tensors(arguments):
    """Tensors that are not on the npu. A CPU tensor without dims is a number, which operators do take."""
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.device.type != "npu" and leaf.dim() > 0]


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return host_view(value) if value.device.type == "npu" else value
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "npu":
        return torch.default_generator
    return value


def _on_meta(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _on_npu(value, device):
    if not isinstance(value, torch.Tensor) or value.device.type == "npu":
        return value
    moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel() and value.device.type == "cpu":
        host_view(moved).copy_(value)
    return moved
