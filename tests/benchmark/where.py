"""Where the processor time of a layer goes, by kind of work.

Processor time of one thread, unlike wall time, hardly grows when other processes share the cores. Operators are timed
at torch's dispatcher on the thread that runs the layer; what the process spends beside that thread is gloo sending and
receiving.
"""

import time
from collections import Counter
from contextlib import nullcontext

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["KINDS", "where"]

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "_grouped_mm"),
    "reordering": ("index", "gather", "scatter", "sort", "argsort", "topk", "_embedding_bag", "embedding_bag"),
    "copies and zeros": (
        "clone",
        "copy",
        "cat",
        "zero",
        "new_zeros",
        "fill",
        "empty",
        "slice_backward",
        "select_backward",
    ),
    "collectives": ("all_to_all", "alltoall", "all_reduce", "allreduce", "wait_tensor"),
}
OTHERS, HOST, GLOO = "elementwise and sums", "Python and the rest", "gloo's threads"


def where(layer, num_repetitions=2):
    """Seconds of one forward and backward by kind, the smallest of the repetitions of each."""
    runs = [_one(layer) for _ in range(num_repetitions)]
    return {kind: min(run[kind] for run in runs) for kind in runs[0]}


def _one(layer):
    own, everything = _process_and_thread(layer, nullcontext())
    seconds = _Operators()
    _process_and_thread(layer, seconds)
    found = {kind: seconds.by_kind[kind] for kind in (*KINDS, OTHERS)}
    found[HOST] = max(0.0, own - sum(found.values()))
    found[GLOO] = everything - own
    return found


def _process_and_thread(layer, mode):
    """Processor seconds of this thread, and of the whole process, of one forward and backward inside ``mode``."""
    layer.clear()
    dist.barrier()
    own, everything = time.thread_time(), time.process_time()
    with mode:
        layer.backward(layer.forward())
    own, everything = time.thread_time() - own, time.process_time() - everything
    dist.barrier()
    return own, everything


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.by_kind = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.by_kind[_kind(func.__name__)] += time.thread_time() - began
        return result


def _kind(name):
    name = name.split(".")[0]
    for kind, prefixes in KINDS.items():
        if name.startswith(prefixes):
            return kind
    return OTHERS
