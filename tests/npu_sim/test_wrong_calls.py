"""Mistakes must raise: those that torch_npu or HCCL would refuse, and those that would be wrong without a word."""

import re
from pathlib import Path

import pytest
import torch

from tests.npu_sim import cases

EXPECTED = {
    "cpu tensor": "No backend type associated with device type cpu",
    "splits do not sum": "Split sizes doesn't match",
    "splits disagree": r"rank 1 sends 24 bytes to rank 0, which expects 12",
    "sizes disagree": r"ranks differ: rank 0 calls all-reduce \(count 3, type 4\), rank 1 all-reduce \(4, 4\)",
    "dtypes disagree": r"ranks differ: rank 0 calls all-reduce \(count 3, type 4\), rank 1 all-reduce \(3, 2\)",
    "two devices": "expected all tensors on the same device",
    "no such device": "Invalid device ID",
}


def test_collectives_and_devices(npu_pool):
    for found in npu_pool.run(cases.wrong_calls):
        assert found.pop("still works") is None
        for what, message in found.items():
            assert message and re.search(EXPECTED[what], message), (what, message)


def test_a_rank_that_stays_away_is_an_error_and_no_hang(npu_pool):
    fresh, used, again = npu_pool.run(cases.rank_stays_away, time_limit_s=30)[0]
    assert "not all ranks came to the first meeting" in fresh
    assert "not all ranks came to all-reduce" in used
    assert "the communicator broke in an earlier call" in again


def test_no_shared_memory_is_left(npu_pool):
    """Also not by the group above, which never came to be."""
    npu_pool.run(cases.rank_stays_away)
    assert [path for pid in npu_pool.process_ids for path in Path("/dev/shm").glob(f"npu-sim-{pid}-*")] == []


def grouped_matmul(npu, rows=10, counts=(4, 0, 6), group_type=0, dtype=torch.bfloat16, **changed):
    import torch_npu

    x, w = torch.ones(rows, 6, device=npu, dtype=dtype), torch.ones(3, 6, 4, device=npu, dtype=dtype)
    if group_type == 2:
        x, w = x.t(), torch.ones(rows, 4, device=npu, dtype=dtype)
    arguments = {"x": [x], "weight": [w], "group_list": torch.tensor(counts, device=npu), **changed}
    return torch_npu.npu_grouped_matmul(**arguments, group_list_type=1, group_type=group_type, split_item=2)[0]


def test_grouped_matmul_as_documented(npu):
    assert grouped_matmul(npu).shape == (10, 4) and grouped_matmul(npu, group_type=2).shape == (3, 6, 4)


WRONG = {
    "int32 counts": dict(group_list=lambda npu: torch.tensor([4, 0, 6], dtype=torch.int32, device=npu)),
    "counts on the cpu": dict(group_list=lambda npu: torch.tensor([4, 0, 6])),
    "counts of one expert": dict(counts=(10,)),
    "counts too small": dict(counts=(4, 0, 5)),
    "counts too large": dict(counts=(4, 0, 7)),
    "negative counts": dict(counts=(14, -4, 0)),
    "mixed dtypes": dict(weight=lambda npu: [torch.ones(3, 6, 4, device=npu, dtype=torch.float16)]),
    "integers": dict(dtype=torch.int16),
    "no such grouping": dict(group_type=1),
    "transposed rows": dict(x=lambda npu: [torch.ones(6, 10, device=npu, dtype=torch.bfloat16).t()]),
    "copied transposition": dict(group_type=2, x=lambda npu: [torch.ones(6, 10, device=npu, dtype=torch.bfloat16)]),
    "no rows": dict(rows=0, counts=(0, 0, 0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_grouped_matmul_refuses(npu, what):
    changed = {name: value(npu) if callable(value) else value for name, value in WRONG[what].items()}
    with pytest.raises(RuntimeError):
        grouped_matmul(npu, **changed)


def test_an_operator_that_is_not_simulated_says_so(npu):
    import torch_npu

    x = torch.ones(4, 4, device=npu)
    index = torch.zeros(4, 1, dtype=torch.int32, device=npu)
    with pytest.raises(RuntimeError, match="aclnnMoeInitRouting"):
        torch_npu.npu_moe_init_routing(x, row_idx=index, expert_idx=index, active_num=4)
