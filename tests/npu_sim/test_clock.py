"""The virtual clock against times that can be worked out by hand."""

import pytest
import torch

from tests.npu_sim import clock_cases, costs
from tests.npu_sim.hollow import arithmetic_up_to
from tests.npu_sim.timeline import Operation, Timeline, exposed_ns

SIZE = clock_cases.SIZE
A2 = costs.ATLAS_A2
PRODUCT_NS = 2 * SIZE**3 / A2.product_flops


@pytest.fixture
def timeline(npu):
    """From here on, without the arithmetic of products."""
    torch.npu.synchronize()
    with arithmetic_up_to(SIZE * SIZE):
        yield Timeline()


@pytest.fixture(scope="module")
def square(npu):
    return torch.ones(SIZE, SIZE, device=npu, dtype=torch.bfloat16)


def test_a_product_takes_its_operations(square, timeline):
    square @ square
    (product,) = timeline.operations()
    assert product.end - product.start == pytest.approx(PRODUCT_NS)
    assert PRODUCT_NS > 2 * costs.ATLAS_A2.launch_ns  # so that the tests below are about devices, not launches


def test_a_sum_takes_its_memory(square, timeline):
    square + square
    (add,) = timeline.operations()
    assert add.end - add.start == pytest.approx(3 * square.nbytes / A2.memory_bytes)


def test_products_on_one_stream_come_one_after_the_other(square, timeline):
    square @ square, square @ square
    first, second = timeline.operations()
    assert second.start == pytest.approx(first.end)


@pytest.mark.parametrize("waits", [False, True])
def test_products_on_two_streams_run_at_once_unless_one_waits(square, timeline, waits):
    side = torch.npu.Stream()
    square @ square
    if waits:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        square @ square
    first, second = timeline.operations()
    assert second.start == pytest.approx(first.end if waits else first.start + A2.launch_ns)


def test_small_kernels_wait_for_the_host(npu, timeline):
    x = torch.ones(8, device=npu)
    x + x
    x + x
    _, first, second = timeline.operations()
    assert second.start - first.start == pytest.approx(A2.launch_ns)


def test_the_host_goes_on_when_what_it_waits_for_is_done(square, timeline):
    square @ square
    torch.npu.synchronize()
    square + square
    product, add = timeline.operations()
    assert add.start == pytest.approx(product.end)


def test_what_runs_on_the_aicpu_takes_longer(npu, timeline):
    numbers = torch.arange(SIZE, device=npu)
    numbers.sort()
    numbers.float().sort()
    slow, fast = (o.end - o.start for o in timeline.operations() if "sort" in o.name)
    assert slow > fast + SIZE * costs.AICPU_NS_PER_ELEMENT / 2


def test_arithmetic_that_is_left_out_takes_its_time(npu):
    def durations():
        timeline = Timeline()
        x = torch.randn(64, 64, device=npu, dtype=torch.bfloat16)
        order = (x @ x).sum(1).sort().indices
        (x[order] + x.t()).softmax(1).masked_fill_(x > 0, 0)
        return {operation.name: operation.end - operation.start for operation in timeline.operations()}

    computed = durations()
    with arithmetic_up_to(100):
        assert durations() == pytest.approx(computed) and len(computed) == 9


def test_exposed_time():
    def busy(start, end, is_collective=False):
        return Operation("", 0, is_collective, start, end)

    collectives = [busy(10, 20, True), busy(15, 30, True), busy(50, 60, True)]
    assert exposed_ns(collectives, collectives) == 30
    assert exposed_ns(collectives, [*collectives, busy(0, 12), busy(11, 14), busy(28, 55)]) == 14 + 5


def test_a_collective_begins_when_the_last_rank_is_there(npu_pool):
    found = npu_pool.run(clock_cases.late_rank)
    assert len({(start, end) for start, end, _ in found}) == 1
    start, end, _ = found[0]
    assert start == pytest.approx(found[1][2])
    nbytes = 4 * SIZE
    slowest = max(2 * nbytes / 4 / A2.pair_bytes, 3 * 2 * nbytes / 4 / A2.rank_bytes)
    assert end - start == pytest.approx(A2.collective_ns + slowest)


def test_a_collective_behind_products_is_not_exposed(npu_pool):
    for collectives, exposed in npu_pool.run(clock_cases.reduce_behind_products, waits_first=True):
        assert exposed == pytest.approx(collectives)
    for collectives, exposed in npu_pool.run(clock_cases.reduce_behind_products, waits_first=False):
        assert collectives > 0 and exposed < 0.1 * collectives


def test_a_moe_layer(npu_pool):
    """Time and exposed communication per pass; of a layer that hides nothing, all communication is exposed."""
    for found in npu_pool.run(clock_cases.moe_layer, style="ExpertTensorParallel", ep=2, tp=2):
        assert found.keys() == {"moe forward", "moe backward"}
        for phase in found.values():
            assert 0 < phase["exposed_ns"] <= phase["collectives_ns"] < phase["time_ns"]
