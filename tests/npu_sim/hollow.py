"""Runs without arithmetic, for the clock: shapes of real models, whose products a CPU would take hours for.

Operators on large floating point tensors, and collectives of many bytes, only allocate their results, whose memory the
system never has to find. Integers are computed as always: routing, counts and orders are real.
"""

import ctypes
from contextlib import contextmanager

from tests.npu_sim.memory import npu_tensors, on_cpu, on_meta

__all__ = ["arithmetic_up_to", "is_large", "view"]

_limit = None  # number of elements; None computes everything


@contextmanager
def arithmetic_up_to(elements):
    """Compute only with floating point tensors of fewer elements, and carry no more than twice as many bytes."""
    global _limit
    carry = ctypes.CDLL("libhccl.so").npu_sim_set_hollow_bytes
    carry.argtypes = [ctypes.c_size_t]
    _limit = elements
    carry(2 * elements)
    try:
        yield
    finally:
        _limit = None
        carry(ctypes.c_size_t(-1).value)


def is_large(*arguments):
    return _limit is not None and any(t.is_floating_point() and t.numel() >= _limit for t in npu_tensors(arguments))


def view(operator, args, kwargs):
    """`on_cpu`, or `on_meta` if the call is to be left out: it has a large tensor, and only floating point results."""
    if not is_large(args, kwargs):
        return on_cpu
    meta_args, meta_kwargs = on_meta((args, kwargs))
    try:
        results = operator(*meta_args, **meta_kwargs)
    except NotImplementedError:  # its sizes depend on values
        return on_cpu
    results = results if isinstance(results, (tuple, list)) else [results]
    return on_meta if all(result is None or result.is_floating_point() for result in results) else on_cpu
