"""Collectives that run beside the rank's own stream, with and without the waits that they need."""

import torch
import torch.distributed as dist

from tests.npu_sim.launches import forget_conflicts

SIZE = 3000
# Per program: its name when complete and when something is left out, and the error it then must get.
PROGRAMS = {
    "result": ("waited for", "not waited for", "all-reduce on stream .* writes .* aten::mul on stream .* reads"),
    "input": ("after the wait", "at once", "all-to-all on stream .* reads .* aten::zero_ on stream .* writes"),
}


def collective(context, what):
    """What each of the two variants of a program raised, None for nothing."""
    found = {name: _message_of(name) for name in PROGRAMS[what][:2]}
    torch.npu.synchronize()
    forget_conflicts()
    return found


def _message_of(name):
    torch.npu.synchronize()
    program, waits = {
        "waited for": (_result, True),
        "not waited for": (_result, False),
        "after the wait": (_input, True),
        "at once": (_input, False),
    }[name]
    try:
        program(waits)
    except RuntimeError as error:
        return str(error)
    return None


def _result(waits):
    x = torch.ones(SIZE, device="npu")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    x * 2
    work.wait()


def _input(waits):
    x = torch.ones(SIZE, device="npu")
    work = dist.all_to_all_single(torch.empty_like(x), x, async_op=True)
    if waits:
        work.wait()
    x.zero_()
    work.wait()
