"""Collectives of MindSpore on Ascend devices, over HCCL. The names and meanings are those of ``cpu_collectives``.

Written after the documents and the source of MindSpore 2.10; there was no device to run them on. What they rest on:

- ``mint.distributed`` exists in PyNative mode only, works in place, and counts splits in rows.
- With ``async_op=True`` an operator runs on a stream of its own, and only ``wait`` orders what follows behind it. Every
  function waits, also where MindSpore would do so by itself.
- The all-to-all passes the addresses of both buffers to HCCL and lets the splits say what is read and written
  (ops/kernel/ascend/pyboost/customize/dist_comm_all_to_all_v_single.cc). A tensor without elements has no address; a
  rank that sends or receives nothing therefore passes a buffer of one row, of which no split speaks. It still takes
  part: HCCL wants every rank of the group in every call.

None of these is differentiable; their gradients are in ``collectives``.
"""

import mindspore.communication as comm
from mindspore import mint
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.rows import copied
from hyper_parallel.platform.operation import operation

__all__ = ["AllToAll", "all_to_all", "all_reduce", "broadcast", "all_gather", "reduce_scatter"]


def _named(name, group):
    # An error of the device itself shows up where the host next waits for it.
    return operation(name, comm.get_process_group_ranks(group), comm.get_rank())


def all_to_all(x, send_splits, recv_splits, group, name):
    """Rows of x [R, ...] to every rank of the group, and theirs to this one, in rank order."""
    return AllToAll(x, send_splits, recv_splits, group, name).wait()


class AllToAll:
    """The same, started; nothing else may be asked of the group before ``wait``."""

    def __init__(self, x, send_splits, recv_splits, group, name):
        self._group, self._name = group, name
        self._num_rows = sum(recv_splits)
        # Kept until the wait: HCCL reads one and writes the other meanwhile.
        self._sent = x.contiguous() if x.shape[0] else mint.zeros((1, *x.shape[1:]), dtype=x.dtype)
        self._received = mint.empty((max(self._num_rows, 1), *x.shape[1:]), dtype=x.dtype)
        with _named(name, group):
            self._handle = dist.all_to_all_single(
                self._received, self._sent, list(recv_splits), list(send_splits), group=group, async_op=True
            )

    def wait(self):
        """The received rows, complete for whatever is asked of the device next, copies to the host included."""
        with _named(self._name, self._group):
            self._handle.wait()
        if self._num_rows:
            return self._received
        return mint.zeros((0, *self._received.shape[1:]), dtype=self._received.dtype)


def all_reduce(x, group, name):
    """Sum over the group, as a new tensor. The ranks' x have the same shape."""
    summed = copied(x)
    if 0 not in x.shape:
        with _named(name, group):
            dist.all_reduce(summed, group=group, async_op=True).wait()
    return summed


def broadcast(x, source, group, name):
    """x of the global rank ``source``, as a new tensor on every rank of the group."""
    copy = copied(x)
    with _named(name, group):
        dist.broadcast(copy, source, group=group, async_op=True).wait()
    return copy


def all_gather(x, group, name):
    """The x of every rank of the group, in rank order, as new tensors. They have the same shape, with elements."""
    gathered = [mint.empty(x.shape, dtype=x.dtype) for _ in range(comm.get_group_size(group))]
    with _named(name, group):
        dist.all_gather(gathered, copied(x), group=group, async_op=True).wait()
    return gathered


def reduce_scatter(x, group, name):
    """This rank's part of the sum of x over the group, of equal parts along the first dim. x has elements."""
    part = mint.empty((x.shape[0] // comm.get_group_size(group), *x.shape[1:]), dtype=x.dtype)
    with _named(name, group):
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=True).wait()
    return part
