"""Collectives of MindSpore 2.10's CPU backend, made whole.

What the backend has: all-reduce, broadcast, list all-gather and point-to-point, also on subgroups. What it lacks, or
gets silently wrong, is dealt with here, once:

- there is no all-to-all and no reduce-scatter: they are made of sends and receives;
- messages without elements break it: they are left out, which both sides know from the counts;
- results written into views are lost: every target is a fresh buffer;
- messages between two ranks match in order whatever the collective: each function is complete when it returns;
- ``mint.distributed.isend`` looks the rank up in a group that exists on Ascend only: the primitive below it is used.

None of these is differentiable; their gradients are in ``collectives``.
"""

from contextlib import contextmanager

import mindspore as ms
import mindspore.communication as comm
from mindspore import mint
from mindspore.mint import distributed as dist

from hyper_parallel.platform.mindspore.compat import dist_comm_irecv_op, dist_comm_isend_op
from hyper_parallel.platform.mindspore.rows import copied
from hyper_parallel.platform.operation import operation

__all__ = ["AllToAll", "all_to_all", "all_reduce", "broadcast", "all_gather", "reduce_scatter"]


@contextmanager
def _named(name, group, synchronize=True):
    with operation(name, comm.get_process_group_ranks(group), comm.get_rank()):
        yield
        if synchronize:  # without this an error shows up in whatever operator comes next
            ms.runtime.synchronize()


def all_to_all(x, send_splits, recv_splits, group, name):
    """Rows of x [R, ...] to every rank of the group, and theirs to this one, in rank order."""
    return AllToAll(x, send_splits, recv_splits, group, name).wait()


class AllToAll:
    """The same, started; nothing else may be asked of the group before ``wait``."""

    def __init__(self, x, send_splits, recv_splits, group, name):
        self._x, self._group, self._name = x, group, name
        rank, size = comm.get_rank(group), comm.get_group_size(group)
        starts = [sum(send_splits[:r]) for r in range(size)]
        self._received = [None] * size
        if send_splits[rank]:
            self._received[rank] = x[starts[rank] : starts[rank] + send_splits[rank]]
        self._handles = []
        with _named(name, group, synchronize=False):
            # All sends first: they are buffered at the receiver, while receives on both sides would wait for ever.
            for r in _peers(rank, size):
                if send_splits[r]:
                    chunk = copied(x[starts[r] : starts[r] + send_splits[r]])
                    self._handles.append(dist_comm_isend_op(chunk, r, group, 0)[1])
            for r in _peers(rank, size):
                if recv_splits[r]:
                    self._received[r] = mint.empty((recv_splits[r], *x.shape[1:]), dtype=x.dtype)
                    self._handles.append(dist_comm_irecv_op(self._received[r], 0, r, group)[1])

    def wait(self):
        """The received rows, complete."""
        with _named(self._name, self._group):
            for handle in self._handles:
                handle.wait()
        pieces = [piece for piece in self._received if piece is not None]
        return mint.cat(pieces, 0) if pieces else mint.zeros((0, *self._x.shape[1:]), dtype=self._x.dtype)


def all_reduce(x, group, name):
    """Sum over the group, as a new tensor. The ranks' x have the same shape."""
    if 0 in x.shape:
        return copied(x)
    if x.dtype == ms.float64:  # the backend reduces every float type but this one
        first, *others = all_gather(x, group, name)
        return sum(others, start=first)
    summed = copied(x)
    with _named(name, group):
        dist.all_reduce(summed, group=group)
    return summed


def broadcast(x, source, group, name):
    """x of the global rank ``source``, as a new tensor on every rank of the group."""
    copy = copied(x)
    with _named(name, group):
        dist.broadcast(copy, source, group=group)
    return copy


def all_gather(x, group, name):
    """The x of every rank of the group, in rank order, as new tensors. They have the same shape, with elements."""
    gathered = [mint.empty(x.shape, dtype=x.dtype) for _ in range(comm.get_group_size(group))]
    with _named(name, group):
        dist.all_gather(gathered, copied(x), group=group)
    return gathered


def reduce_scatter(x, group, name):
    """This rank's part of the sum of x over the group, of equal parts along the first dim. x has elements.

    The backend has none: the parts travel to where they are summed.
    """
    size = comm.get_group_size(group)
    part = x.shape[0] // size
    parts = all_to_all(x, (part,) * size, (part,) * size, group, name)
    return parts.reshape((size, part, *x.shape[1:])).sum(0)


def _peers(rank, size):
    """The other ranks, each rank starting with its right neighbour, so that not all send to one at a time."""
    return [(rank + step) % size for step in range(1, size)]
