"""How often the host waits for the device in a MoE layer, and what runs on the AICPU."""

import pytest

from tests.npu_sim import sequence_cases

# What the library is known to ask for today, in one layer: host waits forward (none backward), and calls on the AICPU
# forward and backward. The tests fail when anything is added, and when something goes, which is then to go here too.
SORT, SCATTER, COUNT, DIVIDE = (name + " int64" for name in ("sort", "scatter_", "scatter_add_", "floor_divide"))
KNOWN = {
    "ExpertTensorParallel": (4, [DIVIDE, SCATTER, COUNT, SORT], [DIVIDE]),
    "DedupExpertTensorParallel": (2, [*[DIVIDE] * 4, *[SCATTER] * 2, *[COUNT] * 2, *[SORT] * 2, "sort uint8"], []),
    "SplitExpertTensorParallel": (4, [DIVIDE, *[SCATTER] * 2, *[COUNT] * 2, *[SORT] * 2], [DIVIDE]),
}


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("style", KNOWN)
def test_waits_and_calls_on_the_aicpu(npu_pool, style, shared):
    waits, forward, backward = KNOWN[style]
    for found in npu_pool.run(sequence_cases.calls, style=style, ep=2, tp=2, shared=shared):
        assert found == {"forward": (waits, forward), "backward": (0, backward)}


def test_what_is_counted(npu_pool):
    for found in npu_pool.run(sequence_cases.planted_calls):
        assert found == {
            "integer sort": (0, ["sort int64"]),
            "float sort": (0, []),
            "sort of one": (0, ["sort float32"]),
            "pageable upload": (1, []),
            "pinned upload": (0, []),
            "read": (1, []),
            "event": (1, []),
        }
