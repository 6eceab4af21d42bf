"""Memory, bytes on each group, and copies to the host, of one call of a layer. The same method for every layer."""

import sys
import time
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["memory", "communication"]

COLLECTIVES = ("all_to_all", "alltoall", "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter")
LARGE = 2**16


def memory(layer):
    """Bytes of the tensors that one call makes.

    Returns:
        ``kept``: alive after forward, the output among it. ``peak``: most alive at one time in forward and backward,
        the gradients among it.
    """
    layer.clear()
    as_tensor = torch.as_tensor
    # Numbers that numpy allocated count too: a copy of them is seen.
    copied = mock.patch.object(torch, "as_tensor", lambda *args, **kwargs: as_tensor(*args, **kwargs).clone())
    with copied, _Allocations() as allocations:
        y = layer.forward()
        time.sleep(0.2)
        kept = allocations.alive
        layer.backward(y)
    layer.clear()
    return {"kept": kept, "peak": allocations.peak}


class _Allocations(TorchDispatchMode):
    """Follows the storage of every tensor that an operator returns, until it is freed.

    What torch's profiler records would be simpler, but it does not bear gloo's threads freeing tensors beside it.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            self._follow(tensor.untyped_storage(), 0)  # unless an operator made it, it was there before
        outputs = func(*args, **(kwargs or {}))
        for tensor in _tensors(outputs):
            self._follow(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return outputs

    def _follow(self, storage, size):
        key = storage._cdata
        if key in self._known:
            return
        if size >= LARGE:
            # gloo's thread lets go of what it has sent a little later than the wait ends.
            time.sleep(0.003)
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key, size):
        self._known.discard(key)
        self.alive -= size


def _tensors(tree):
    """The plain tensors of nested arguments; of a wrapper, what it wraps."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield getattr(leaf, "elem", leaf)


def communication(layer, mesh):
    """What one forward and backward send and copy.

    Returns:
        ``traffic``: axis -> bytes that this rank hands to its collectives, (forward, backward); collectives among one
        rank are left out, for nothing leaves it. ``host_copies``: how often a device would be copied from, if these
        tensors lay on one. A tensor counts as one on the host only if it came from ``cpu()`` or ``to("cpu")``.
    """
    layer.clear()
    with _PretendedDevice() as pretended:
        with _Collectives() as forward:
            y = layer.forward()
        with _Collectives() as backward:
            layer.backward(y)
    layer.clear()
    axes = {tuple(dist.get_process_group_ranks(mesh.get_group(axis))): axis for axis in ("ep", "tp")}
    traffic = {axis: (forward.bytes[r], backward.bytes[r]) for r, axis in axes.items() if len(r) > 1}
    return {"traffic": traffic, "host_copies": pretended.copies}


class _Collectives(TorchDispatchMode):
    """Sees the collectives at torch's dispatcher, where c10d's and the functional ones both pass."""

    def __enter__(self):
        self.bytes = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and func.__name__.startswith(COLLECTIVES):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func, args):
        if func.namespace == "_c10d_functional":
            sent, group = args[0], next(arg for arg in reversed(args) if isinstance(arg, str))
            group = dist.distributed_c10d._resolve_process_group(group)
        else:
            # alltoall_base_(output, input, ...), but allreduce_([tensor], ...)
            sent = args[1] if "alltoall_base" in func.__name__ else args[0]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(group)
        tensors = sent if isinstance(sent, list | tuple) else [sent]
        ranks = tuple(dist.get_process_group_ranks(group))
        self.bytes[ranks] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _PretendedDevice:
    """Counts copies to the host as if every tensor that was not made on the host lay on a device."""

    def __enter__(self):
        from hyper_parallel.platform.torch.host import HOST_VALUES
        from hyper_parallel.platform.torch.platform import TorchPlatform

        self.copies, self._on_host, self._stack = 0, {}, ExitStack()
        patches = [(torch.Tensor, name, self._reading) for name in ("tolist", "item", "numpy", "__bool__", "__int__")]
        patches += [(torch.Tensor, "cpu", self._to_host), (torch.Tensor, "to", self._moving)]
        patches += [(torch, "as_tensor", self._made_on_host)]
        for owner, name, wrapped in patches:
            self._stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        # On a device our library does not look at counts that it has no host copy of.
        known_on_host = mock.patch.object(TorchPlatform, "on_host", lambda _, tensor: hasattr(tensor, HOST_VALUES))
        self._stack.enter_context(known_on_host)
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _remember(self, tensor):
        self._on_host[id(tensor)] = tensor  # kept, so that no other tensor gets its id
        return tensor

    def _copied(self, tensor):
        caller = sys._getframe(2)
        # A device mesh keeps its ranks on the host. TorchTitan's indices are made by a kernel on a device; what stands
        # in for it on a CPU reads every number.
        counted = caller.f_globals["__name__"] != "torch.distributed.device_mesh"
        counted = counted and caller.f_code.co_name != "fill_indices_cpu"
        self.copies += counted and id(tensor) not in self._on_host

    def _reading(self, original):
        def call(tensor, *args, **kwargs):
            self._copied(tensor)
            return original(tensor, *args, **kwargs)

        return call

    def _to_host(self, original):
        def call(tensor, *args, **kwargs):
            self._copied(tensor)
            return self._remember(original(tensor, *args, **kwargs).view_as(tensor))

        return call

    def _moving(self, original):
        def call(tensor, *args, **kwargs):
            device = kwargs.get("device", args[0] if args else None)
            moved = original(tensor, *args, **kwargs)
            if not isinstance(device, torch.device):
                return moved
            if id(tensor) in self._on_host:  # to the device
                return moved.view_as(moved)
            self._copied(tensor)
            return self._remember(moved.view_as(moved))

        return call

    def _made_on_host(self, original):
        return lambda *args, **kwargs: self._remember(original(*args, **kwargs))
