"""Checkpoints over ranks: from any mesh to any other, between the frameworks, and what goes wrong on one rank."""

import json
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.checkpoint import consolidate
from hyper_parallel.checkpoint.tensor_files import CHUNK
from tests.distributed import checkpoint_cases as cases
from tests.harness.by_name import CasesOf

torch_cases = CasesOf("tests.distributed.checkpoint_torch")
LIMIT = {"float64": 1e-12, "float32": 1e-5}


def worst(per_rank, expected):
    """The largest error of any tensor on any rank, relative to the tensor's largest element."""
    errors = []
    for found in per_rank:
        assert found.keys() == expected.keys()
        errors += [
            np.abs(found[name] - expected[name]).max() / max(np.abs(expected[name]).max(), 1e-3) for name in found
        ]
    return max(errors)


@pytest.fixture(scope="session")
def torch_in_a_row(torch_pool):
    return torch_pool.run(cases.five_in_a_row, dtype="float64")[0]


def test_torch_goes_on_elsewhere(torch_pool, torch_in_a_row, tmp_path):
    torch_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float64")
    for ep, tp in ((4, 1), (1, 4), (2, 2), (2, 1)):
        found = torch_pool.run(cases.load_and_two, folder=str(tmp_path / "a"), dtype="float64", ep=ep, tp=tp)
        assert worst(found, torch_in_a_row) < LIMIT["float64"]
    with_split = torch_pool.run(
        cases.load_and_two, folder=str(tmp_path / "a"), dtype="float64", ep=2, tp=2, style="SplitExpertTensorParallel"
    )
    assert worst(with_split, torch_in_a_row) < LIMIT["float64"]


def test_without_the_moments_it_would_not(torch_pool, torch_in_a_row, tmp_path):
    torch_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float64")
    found = torch_pool.run(
        cases.load_and_two, folder=str(tmp_path / "a"), dtype="float64", ep=4, tp=1, with_optimizer=False
    )
    assert worst(found, torch_in_a_row) > 1e-3


def test_asynchronous(torch_pool, torch_in_a_row, tmp_path):
    torch_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float64", ep=1, tp=4, asynchronous=True)
    found = torch_pool.run(cases.load_and_two, folder=str(tmp_path / "a"), dtype="float64", ep=2, tp=2)
    assert worst(found, torch_in_a_row) < LIMIT["float64"]


def test_mindspore_goes_on_elsewhere(mindspore_pool, tmp_path):
    expected = mindspore_pool.run(cases.five_in_a_row, dtype="float32")[0]
    mindspore_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float32", asynchronous=True)
    for ep, tp in ((4, 1), (1, 2)):
        found = mindspore_pool.run(cases.load_and_two, folder=str(tmp_path / "a"), dtype="float32", ep=ep, tp=tp)
        assert worst(found, expected) < LIMIT["float32"]


@pytest.mark.parametrize("there,here", [("torch", "mindspore"), ("mindspore", "torch")])
def test_the_other_framework_goes_on(torch_pool, mindspore_pool, tmp_path, there, here):
    pools = {"torch": torch_pool, "mindspore": mindspore_pool}
    expected = pools[there].run(cases.five_in_a_row, dtype="float32")[0]
    pools[there].run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float32")
    for ep, tp in ((1, 4), (4, 1)):
        found = pools[here].run(cases.load_and_two, folder=str(tmp_path / "a"), dtype="float32", ep=ep, tp=tp)
        assert worst(found, expected) < LIMIT["float32"]


def test_torchs_plain_distributed_checkpoint_reads_it(torch_pool, tmp_path):
    torch_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float64")
    ours = torch_pool.run(cases.load_and_two, folder=str(tmp_path / "a"), dtype="float64", ep=4, tp=1)
    assert worst(ours, ours[1]) == 0
    theirs = torch_pool.run(torch_cases.read_by_torch, folder=str(tmp_path / "a"), ep=1, tp=4)
    consolidate(tmp_path / "a", tmp_path / "whole")
    again = torch_pool.run(torch_cases.read_by_torch, folder=str(tmp_path / "whole"), ep=2, tp=2)
    assert worst(again, theirs[0]) == 0
    assert np.abs(theirs[0]["moe.experts.w1"]).max() > 0.1


def test_each_rank_writes_its_own_share(torch_pool, tmp_path):
    torch_pool.run(cases.three_and_save, folder=str(tmp_path / "a"), dtype="float64")
    manifest = json.loads((tmp_path / "a" / "checkpoint.json").read_text())
    w2 = manifest["model"]["moe.experts.w2"]
    assert w2["shape"] == [4, 8, 16]
    assert sorted((*p["offsets"], *p["shape"]) for p in w2["pieces"]) == [
        (e, 0, h, 2, 8, 8) for e in (0, 2) for h in (0, 8)
    ]
    sizes = [(tmp_path / "a" / name).stat().st_size for name in manifest["files"] if name.startswith("model")]
    assert len(sizes) == 4 and sum(sizes) < CHUNK
    assert len(manifest["model"]["first.weight"]["pieces"]) == 1


@pytest.mark.parametrize("change", ["one rank cannot write", "another mesh's arguments"])
def test_an_error_on_one_rank_is_an_error_on_all(pool, tmp_path, change):
    found = pool.run(cases.errors, folder=str(tmp_path / "a"), change=change)
    assert len(set(found)) == 1 and found[0] is not None
    message, _ = found[0]
    if change == "one rank cannot write":
        assert "on rank 2: OSError: no space left" in message
    else:
        assert "ask for different checkpoints" in message
    assert not list(tmp_path.iterdir())


def test_one_altered_file_is_named_on_all_ranks(pool, tmp_path):
    folder = tmp_path / "a"
    pool.run(cases.three_and_save, folder=str(folder), dtype="float32")
    rank1, rank2 = (folder / "optimizer" / f"rank-0000{rank}-of-00004.safetensors" for rank in (1, 2))
    rank1.rename(folder / "kept"), rank2.rename(rank1), Path(folder / "kept").rename(rank2)
    found = pool.run(cases.errors, folder=str(folder), change="load")
    assert len(set(found)) == 1
    message, untouched = found[0]
    assert str(rank1) in message and str(rank2) in message and untouched


def test_random_state(pool, tmp_path):
    found = pool.run(cases.random_numbers, folder=str(tmp_path / "a"))
    for first, again, second in found:
        assert first == again and first != second
    assert len({tuple(first) for first, _, _ in found}) == 4


@pytest.mark.parametrize("shape,other", [((2, 2, 1), (2, 1, 2)), ((2, 1, 2), (2, 2, 1))])
def test_fsdp2(torch_pool, tmp_path, shape, other):
    found = torch_pool.run(torch_cases.fsdp, folder=str(tmp_path / "a"), shape=shape, other=other)
    assert [error for _, error in found] == [0.0] * 4
    assert ("_StridedShard" in found[0][0]) == (shape[1] > 1)  # where dp cuts what ep has cut


def test_uneven_shards(torch_pool, tmp_path):
    found = torch_pool.run(torch_cases.uneven, folder=str(tmp_path / "a"))
    assert found == [((2, 3), True), ((2, 3), True), ((1, 3), True), ((0, 3), True)]


def test_a_partial_tensor_is_refused(torch_pool, tmp_path):
    found = torch_pool.run(torch_cases.partial_is_refused, folder=str(tmp_path / "a"))
    assert len(set(found)) == 1 and "weight has the placement Partial" in found[0]
