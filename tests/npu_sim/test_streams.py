"""Streams, events and memory: what is ordered passes, and what is not is an error that names both operations.

Every test leaves out one thing that a correct program does.
"""

import ctypes
import re

import pytest
import torch

from tests.npu_sim import stream_cases
from tests.npu_sim.launches import conflicts, forget_conflicts, last_conflict, runtime

SIZE = 3000


@pytest.fixture
def side(npu):
    """A second stream, with nothing under way anywhere."""
    torch.npu.synchronize()
    forget_conflicts()
    yield torch.npu.Stream()
    torch.npu.synchronize()
    forget_conflicts()


def expect(what, complete):
    """Whether a conflict was found, in which case it must be the one described; if the program was complete, none."""
    assert conflicts() == (0 if complete else 1), last_conflict()
    assert complete or re.search(what, last_conflict())


def attempt(program, *arguments):
    """Runs the program; an error that is a conflict is left to `expect`."""
    try:
        return program(*arguments)
    except RuntimeError as error:
        assert "nothing orders" in str(error)


def main_stream():
    return torch.npu.current_stream()


LEFT_OUT = [None, "wait"]


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_stream_waits_for_the_stream_that_wrote(npu, side, left_out):
    def program():
        x = torch.ones(SIZE, device=npu)
        if left_out is None:
            side.wait_stream(main_stream())
        with torch.npu.stream(side):
            x * 2

    attempt(program)
    expect("aten::ones on stream .*, which writes .* and aten::mul on stream .*, which reads", left_out is None)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_stream_waits_for_the_event_of_the_stream_that_wrote(npu, side, left_out):
    def program():
        x, written = torch.zeros(SIZE, device=npu), torch.npu.Event()
        side.wait_stream(main_stream())
        with torch.npu.stream(side):
            x.add_(1)
            written.record()
        if left_out is None:
            written.wait()
        x * 2

    attempt(program)
    expect("aten::add_ on stream .*, which writes .* and aten::mul on stream .*, which reads", left_out is None)


def test_an_event_that_was_recorded_too_early(npu, side):
    """It orders what was launched before it was recorded, and nothing after."""

    def program():
        x, early = torch.zeros(SIZE, device=npu), torch.npu.Event()
        early.record()
        x.add_(1)
        early.wait(side)
        with torch.npu.stream(side):
            x * 2

    attempt(program)
    expect("aten::add_ .* and aten::mul", complete=False)


def test_a_read_that_is_overwritten(npu, side):
    def program():
        x = torch.zeros(SIZE, device=npu)
        side.wait_stream(main_stream())
        with torch.npu.stream(side):
            x * 2
        x.zero_()

    attempt(program)
    expect("aten::mul on stream .*, which reads .* and aten::zero_ on stream .*, which writes", complete=False)


@pytest.mark.parametrize("left_out", [None, "record_stream"])
def test_memory_that_is_given_out_again(npu, side, left_out):
    """The allocator gives the memory of `x` out again, although the other stream still reads it, unless it is told."""

    def program():
        x = torch.ones(SIZE, device=npu)
        side.wait_stream(main_stream())
        with torch.npu.stream(side):
            x.repeat(1000)
        if left_out is None:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        again = torch.empty(SIZE, device=npu)
        assert (again.data_ptr() == address) == (left_out == "record_stream")
        again.zero_()

    attempt(program)
    expect("aten::repeat on stream .*, which reads .* and aten::zero_ on stream .*, which writes", left_out is None)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_device_memory_that_is_freed(npu, side, left_out):
    library, pointer = runtime(), ctypes.c_void_p()
    assert library.aclrtMalloc(ctypes.byref(pointer), 4096, 0) == 0
    assert library.aclrtMemsetAsync(pointer, 4096, 0, 4096, ctypes.c_void_p(side.npu_stream)) == 0
    if left_out is None:
        side.synchronize()
    assert (library.aclrtFree(pointer) == 0) == (left_out is None)
    expect("memset on stream .*, which writes .* and aclrtFree on stream 0, which writes", left_out is None)


def test_device_memory_that_was_freed(npu, side):
    library, pointer = runtime(), ctypes.c_void_p()
    assert library.aclrtMalloc(ctypes.byref(pointer), 1 << 24, 0) == 0 and library.aclrtFree(pointer) == 0
    run = (ctypes.c_uint64 * 2)(pointer.value, 8)
    assert library.npu_sim_launch(b"late", 0, ctypes.c_void_p(side.npu_stream), run, 1, 0, 0.0, 0.0) != 0
    expect("late on stream .* reads 8 bytes at .*, which are not allocated", complete=False)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_the_host_reads_what_a_copy_writes(npu, side, left_out):
    numbers, target, copied = torch.arange(8, device=npu), torch.empty(8, dtype=torch.int64).pin_memory(), None
    target.copy_(numbers, non_blocking=True)
    copied = torch.npu.Event()
    copied.record()
    if left_out is None:
        copied.synchronize()
    target.tolist()
    expect("the host, which touches pinned memory .* and copy from device to host on stream .*", left_out is None)
    if left_out:  # no call was there to raise it, so that the next launch does
        with pytest.raises(RuntimeError, match="the host, which touches pinned memory"):
            numbers + 1


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_the_host_writes_what_a_copy_reads(npu, side, left_out):
    numbers = torch.arange(8).pin_memory()
    numbers.to(npu, non_blocking=True)
    assert numbers.tolist() == list(range(8))  # both may read
    if left_out is None:
        main_stream().synchronize()
    numbers.add_(1)
    expect("the host, which touches pinned memory .* and copy from host to device on stream .*", left_out is None)
    attempt(lambda: torch.ones(1, device=npu))


def test_pinned_memory_that_is_given_out_again(npu, side):
    """torch_npu asks for the event of the copy before it gives the memory out: there is nothing to leave out."""
    for _ in range(3):
        torch.arange(SIZE).pin_memory().to(npu, non_blocking=True)
    expect("", complete=True)


def test_columns_are_memory_of_their_own(npu, side):
    x = torch.zeros(6, 10, device=npu)
    side.wait_stream(main_stream())
    x[:, 4:].add_(1)
    with torch.npu.stream(side):
        x[:, :4].t().add_(1)
        expect("", complete=True)
        attempt(lambda: x[:, 3:5].add_(1))
    expect("aten::add_ on stream .*, which writes 4 bytes .* and aten::add_", complete=False)


def test_readers_need_no_order(npu, side):
    x = torch.ones(SIZE, device=npu)
    streams = [torch.npu.Stream() for _ in range(8)]
    for stream in streams:
        stream.wait_stream(main_stream())
        with torch.npu.stream(stream):
            x * 2
    expect("", complete=True)
    for stream in streams:
        main_stream().wait_stream(stream)
    x.zero_()
    expect("", complete=True)


@pytest.mark.parametrize("what", stream_cases.PROGRAMS)
def test_collectives(npu_pool, what):
    complete, broken, error = stream_cases.PROGRAMS[what]
    for found in npu_pool.run(stream_cases.collective, what=what):
        assert found[complete] is None and re.search(error, found[broken])
