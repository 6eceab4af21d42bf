"""The pool and the framework adapter, on real ranks."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.harness.pool import ROOT, RankFailure, RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def small_pool(platform):
    """Three ranks for the tests that break their pool; a collective gives up soon on a rank that does not come."""
    with RankPool(platform, 3, collective_limit_s=6) as pool:
        yield pool


def is_running(pid):
    """Whether the process exists and is more than an entry that its new parent has not collected yet."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    return bool(state) and not state.startswith("Z")


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.1)


def assert_works(pool):
    size = pool.world_size
    for rank, (own_rank, world_size, total) in enumerate(pool.run(sum_over_ranks, factor=2.0)):
        assert (own_rank, world_size) == (rank, size)
        np.testing.assert_array_equal(total, np.full((2, 3), size * (size + 1)))


def sum_over_ranks(context, factor=1.0):
    if context.platform == "torch":
        from torch import distributed
    else:
        from mindspore.mint import distributed
    tensor = context.framework.tensor(np.full((2, 3), factor * (context.rank + 1)))
    distributed.all_reduce(tensor)
    return context.rank, context.world_size, context.framework.array(tensor)


def raise_on(context, ranks):
    print("printed before the failure")
    if context.rank in ranks:
        raise KeyError("a lost key")
    return sum_over_ranks(context)


def die_on(context, ranks):
    if context.rank in ranks:
        os._exit(7)
    return sum_over_ranks(context)


def stay_away(context, rank):
    return "away" if context.rank == rank else sum_over_ranks(context)


def sleep_on(context, rank):
    if context.rank == rank:
        time.sleep(600)
    return context.rank


def unpicklable(context):
    return (lambda: context.rank) if context.rank == 0 else context.rank


def start_child(context):
    return subprocess.Popen(["sleep", "600"]).pid


def test_a_collective_gives_the_same_right_value_on_every_rank(pool):
    assert_works(pool)
    before = pool.process_ids
    assert_works(pool)
    assert pool.process_ids == before


def test_a_raising_case_is_shown_per_rank_and_ranks_that_wait_for_it_too(small_pool):
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        small_pool.run(raise_on, ranks=[0, 2])
    assert time.monotonic() - began < 45, "the time limit of the case was waited for"
    message = str(failure.value)
    assert "test_pool:raise_on failed on ranks 0,1,2 of 3" in message
    assert "--- ranks 0,2 raised\nTraceback" in message and message.count("KeyError: 'a lost key'") == 1
    assert "--- rank 1 had not answered after " in message
    assert "--- ranks 0,2 printed last\nprinted before the failure" in message
    assert "in sum_over_ranks" in message, "the stack of the silent rank is missing"
    assert_works(small_pool)


def test_the_others_get_an_error_when_a_rank_dies(small_pool):
    outcomes = small_pool.run(die_on, ranks=[1], collect=True)
    assert (outcomes[1].error, outcomes[1].message, outcomes[1].died) == ("", "exited with code 7", 7)
    assert [(outcomes[rank].error, outcomes[rank].died) for rank in (0, 2)] == [("RuntimeError", None)] * 2


def test_the_others_get_an_error_when_a_rank_stays_away(small_pool):
    outcomes = small_pool.run(stay_away, rank=0, collect=True)
    assert outcomes[0] == "away"
    assert [outcomes[rank].error for rank in (1, 2)] == ["RuntimeError"] * 2


def test_a_case_over_its_time_limit(small_pool):
    assert_works(small_pool)
    pids = small_pool.process_ids
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"failed on rank 1 of 3 .*\n--- rank 1 had not answered after 1.0 s"):
        small_pool.run(sleep_on, rank=1, time_limit_s=1, collect=True)
    assert time.monotonic() - began < 5
    assert_gone(pids)
    assert_works(small_pool)


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank(small_pool):
    with pytest.raises(RankFailure, match="failed on rank 0 of 3"):
        small_pool.run(unpicklable)


def test_only_functions_a_rank_can_import_are_cases(small_pool):
    with pytest.raises(ValueError, match="top-level function"):
        small_pool.run(lambda context: None)


def test_close_leaves_no_process(platform):
    with RankPool(platform, 2) as pool:
        pids = pool.run(start_child)
        pids += pool.process_ids
        assert len(pids) == 4 + (platform == "mindspore")
        assert all(is_running(pid) for pid in pids)
    assert pool.process_ids == []
    assert_gone(pids)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_ranks_end_with_their_parent_even_in_a_collective(platform, sent, tmp_path):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import signal
from tests.harness import test_pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
pool = test_pool.RankPool({platform!r}, 2, collective_limit_s=100)
test_pool.assert_works(pool)
print(*pool.process_ids, flush=True)
pool.run(test_pool.stay_away, rank=0)
""",
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.5)  # Long enough for rank 1 to wait in the collective.
        assert len(pids) >= 2 and all(is_running(pid) for pid in pids)
        parent.send_signal(sent)
        parent.wait(timeout=20)
        assert_gone(pids)
    finally:
        parent.kill()
        parent.wait(timeout=20)


def test_a_failing_start_shows_why(platform, tmp_path, monkeypatch):
    (tmp_path / f"{platform}.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RankPool(platform, 2) as pool:
        with pytest.raises(RankFailure, match=r"(?s)starting failed on ranks 0,1 of 2 .*a broken installation"):
            pool.run(sum_over_ranks)
        assert pool.process_ids == []
