"""What the simulated device would be doing when: the launches of this process on the clock of src/clock.c.

timeline = Timeline()
timeline.watch("moe", layer)
layer(x).backward(grad)
timeline.report()["moe forward"].exposed_ns
"""

import ctypes
from dataclasses import dataclass

from tests.npu_sim.launches import COLLECTIVE, runtime

__all__ = ["Operation", "Phase", "Timeline", "exposed_ns"]


class _Record(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 48),
        ("stream", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("start", ctypes.c_double),
        ("end", ctypes.c_double),
    ]


@dataclass(frozen=True)
class Operation:
    """A kernel, copy or collective; times in ns since the process began, of virtual time."""

    name: str
    stream: int
    is_collective: bool
    start: float
    end: float


@dataclass(frozen=True)
class Phase:
    """One pass of a layer, in ns of virtual time.

    `time_ns` is from its first start to its last end, `collectives_ns` is while at least one collective runs, and
    `exposed_ns` the part of that in which the device does nothing else.
    """

    time_ns: float
    collectives_ns: float
    exposed_ns: float


class Timeline:
    """The launches of this process from here on, and which of them belong to which layer."""

    def __init__(self):
        self._first = runtime().npu_sim_num_operations()
        self._phases = {}

    def watch(self, name, module):
        """Note what the module launches, as "name forward" and "name backward"."""
        module.register_forward_pre_hook(lambda *_: self._begin(f"{name} forward"))
        module.register_forward_hook(lambda *_: self._end(f"{name} forward"))
        module.register_full_backward_pre_hook(lambda *_: self._begin(f"{name} backward"))
        module.register_full_backward_hook(lambda *_: self._end(f"{name} backward"))

    def _begin(self, phase):
        self._phases[phase] = (runtime().npu_sim_num_operations(), None)

    def _end(self, phase):
        self._phases[phase] = (self._phases[phase][0], runtime().npu_sim_num_operations())

    def operations(self):
        """All launches so far, in the order of the calls."""
        count = runtime().npu_sim_num_operations() - self._first
        records = (_Record * count)()
        found = runtime().npu_sim_operations(self._first, records, count)
        if found != count:
            raise RuntimeError(f"the runtime keeps fewer than {count} launches: watch a shorter stretch")
        return [Operation(r.name.decode(), r.stream, r.kind == COLLECTIVE, r.start, r.end) for r in records]

    def report(self):
        """A `Phase` for every pass of a watched layer that has ended; the last one of each name."""
        operations = self.operations()
        return {
            name: _phase(operations, operations[begin - self._first : end - self._first])
            for name, (begin, end) in self._phases.items()
            if end is not None and end > begin
        }

    def chrome_trace(self):
        """The launches as events for chrome://tracing or Perfetto: a row per stream, times in us."""
        return [
            {"name": o.name, "ph": "X", "pid": 0, "tid": o.stream, "ts": o.start / 1e3, "dur": (o.end - o.start) / 1e3}
            for o in self.operations()
        ]


def _phase(operations, own):
    collectives = [operation for operation in own if operation.is_collective]
    time_ns = max(operation.end for operation in own) - min(operation.start for operation in own)
    return Phase(time_ns, _length(_union(collectives)), exposed_ns(collectives, operations))


def exposed_ns(collectives, operations):
    """For how long at least one of the collectives runs while no kernel and no copy of `operations` does."""
    busy = _union([operation for operation in operations if not operation.is_collective])
    return sum(end - start - _overlap(start, end, busy) for start, end in _union(collectives))


def _union(operations):
    """Disjoint intervals that cover the operations, in order of time."""
    intervals = []
    for start, end in sorted((operation.start, operation.end) for operation in operations):
        if intervals and start <= intervals[-1][1]:
            intervals[-1][1] = max(intervals[-1][1], end)
        else:
            intervals.append([start, end])
    return intervals


def _length(intervals):
    return sum(end - start for start, end in intervals)


def _overlap(start, end, intervals):
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in intervals)
