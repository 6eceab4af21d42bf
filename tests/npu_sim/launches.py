"""What the simulated runtime (src/) is told of kernels, and what it can tell: waits, conflicts, virtual time."""

import array
import ctypes
import functools

from tests.npu_sim import costs
from tests.npu_sim.memory import npu_tensors

__all__ = ["launch", "host_waits", "conflicts", "forget_conflicts", "last_conflict", "runtime"]

COMPUTE, COPY, COLLECTIVE = range(3)


@functools.cache
def runtime():
    """The library that torch_npu has loaded as AscendCL."""
    library = ctypes.CDLL("libascendcl.so")
    library.npu_sim_launch.argtypes = [
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_double, ctypes.c_double),
    ]
    library.npu_sim_stream_syncs.restype = library.npu_sim_conflicts.restype = ctypes.c_long
    library.npu_sim_last_conflict.restype = ctypes.c_char_p
    library.npu_sim_host_time.restype = ctypes.c_double
    return library


def host_waits():
    """How often the host has waited for the device in this process: for a stream, an event, or all of it."""
    return runtime().npu_sim_stream_syncs()


def conflicts():
    """How many unordered accesses to the same memory were found in this process; each was raised as an error too, where
    there was a call to raise it."""
    return runtime().npu_sim_conflicts()


def forget_conflicts():
    """For a test that has caused some on purpose."""
    runtime().npu_sim_forget_conflicts()


def last_conflict():
    return runtime().npu_sim_last_conflict().decode()


def launch(name, reads, writes, device, on_aicpu=False):
    """A kernel on the current stream of `device` that reads and writes tensors (or nests of them).

    It raises if another launch touches the same memory and nothing orders the two.
    """
    reads, writes = npu_tensors(reads), npu_tensors(writes)
    read_runs, write_runs = _runs(reads), _runs(writes)
    runs = array.array("Q", read_runs + write_runs)
    import torch_npu

    stream = torch_npu._C._npu_getCurrentRawStreamNoWait(device.index or 0)
    error = runtime().npu_sim_launch(
        name.encode(),
        COMPUTE,
        stream,
        runs.buffer_info()[0],
        len(read_runs) // 2,
        len(write_runs) // 2,
        0.0,
        costs.kernel_ns(name, reads, writes, on_aicpu),
    )
    if error:
        raise RuntimeError(f"[npu-sim] {last_conflict()}")


def _runs(tensors):
    """Addresses and sizes of the contiguous pieces of memory that npu tensors cover, one after the other."""
    runs = []
    for tensor in tensors:
        if tensor.numel():
            _add_runs(runs, tensor)
    return runs


def _add_runs(runs, tensor):
    size = tensor.element_size()
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * size
    if tensor.is_contiguous():
        runs += (address, tensor.numel() * size)
        return
    length, outer = size, []
    for stride, count in sorted(zip(tensor.stride(), tensor.shape)):
        if count == 1 or stride == 0:
            continue
        if stride * size == length and not outer:
            length *= count
        else:
            outer.append((stride * size, count))
    starts = [address]
    for stride, count in outer:
        starts = [start + i * stride for start in starts for i in range(count)]
    for start in starts:
        runs += (start, length)
