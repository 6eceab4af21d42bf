"""How often the host waits for the device in a MoE layer, and what runs on the AICPU."""

import pytest

from tests.npu_sim import sequence_cases

STYLES = ["ExpertTensorParallel", "DedupExpertTensorParallel", "SplitExpertTensorParallel"]


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("style", STYLES)
def test_one_wait_forward_none_backward_and_nothing_on_the_aicpu(npu_pool, style, shared):
    for found in npu_pool.run(sequence_cases.calls, style=style, ep=2, tp=2, shared=shared):
        assert found == {"forward": (1, []), "backward": (0, [])}


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
