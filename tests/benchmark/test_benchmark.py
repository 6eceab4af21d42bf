"""The benchmark measures what it says. Nothing here depends on how long anything takes."""

import importlib.util
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from tests.benchmark import summary
from tests.benchmark.settings import Work, quick_plan
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.benchmark.torch_cases")
needs_titan = pytest.mark.skipif(
    not importlib.util.find_spec("torchtitan"), reason="needs: pip install --no-deps torchtitan==0.2.2"
)
SHAPE = quick_plan().works[0].shape


@pytest.fixture(scope="module")
def measured(torch_pool):
    """Every layer on every mesh, in fp32."""
    works = [work for work in quick_plan().works if work.dtype == "float32"]
    return {work: torch_pool.run(cases.compare, work=work, num_repetitions=2) for work in works}


def test_bytes_are_those_of_the_model(measured):
    from tests.benchmark import model

    for work, per_rank in measured.items():
        found = summary.summarize(work, per_rank)["traffic"]["ours"]
        assert {axis: tuple(sizes) for axis, sizes in found.items()} == model.payload(work)


def test_scores_inside_travel_with_the_rows(measured):
    from tests.benchmark import model

    for work, per_rank in measured.items():
        if work.layer == "moe":
            found = summary.summarize(work, per_rank)["traffic"]["scores inside"]
            assert {axis: tuple(sizes) for axis, sizes in found.items()} == model.payload(work, scores=True)


def test_kept_bytes_are_those_of_the_model(measured):
    from tests.benchmark import model

    for work, per_rank in measured.items():
        if work.layer != "experts":
            continue
        output = work.tokens * work.shape.top_k * work.shape.dim * work.itemsize
        mean = np.mean([rank["memory"]["ours"]["kept"] for rank in per_rank])
        assert mean == model.kept_bytes(work) + output


def test_one_copy_to_the_host(measured):
    for per_rank in measured.values():
        assert all(rank["host_copies"]["ours"] == 1 for rank in per_rank)


@needs_titan
def test_different_functions_are_not_compared(measured):
    work, per_rank = next(iter(measured.items()))
    assert max(summary.summarize(work, per_rank)["differences"].values()) < summary.TOLERANCE["float32"]
    per_rank = [{**rank, "differences": {**rank["differences"], "titan: output": 0.1}} for rank in per_rank]
    with pytest.raises(summary.Disagreement, match="titan: output"):
        summary.summarize(work, per_rank)


def test_ratios_are_taken_within_a_repetition():
    # Two ranks; ours takes twice the floor in each of three repetitions, though a repetition's load differs.
    spans = {"floor": [], "ours": []}
    for load in (1.0, 10.0, 3.0):
        spans["floor"].append((0.0, load, 0.0, load, 1.0, 1.0))
        spans["ours"].append((0.0, 2 * load, 0.0, 2 * load, 1.0, 1.0))
    rank = {"spans": spans, "differences": {}, "memory": {}, "traffic": {}, "host_copies": {}, "notes": {}, "where": {}}
    found = summary.summarize(Work("experts", "float32", 2, 1, SHAPE), [rank, rank])
    assert found["ratios"]["ours / floor"]["both"] == [2.0, 2.0, 2.0]
    assert found["milliseconds"]["floor"]["both"] == 6000.0


def test_the_slowest_rank_counts():
    early, late = (0.0, 1.0, 2.0, 3.0, 0.0, 0.0), (0.5, 2.0, 2.0, 5.0, 0.0, 0.0)
    ranks = [
        {
            "spans": {"floor": [span]},
            "differences": {},
            "memory": {},
            "traffic": {},
            "host_copies": {},
            "notes": {},
            "where": {},
        }
        for span in (early, late)
    ]
    found = summary.summarize(Work("experts", "float32", 2, 1, SHAPE), ranks)["milliseconds"]["floor"]
    assert (found["forward"], found["backward"]) == (2000.0, 3000.0)


@needs_titan
def test_a_quick_run_writes_everything(torch_pool, tmp_path, monkeypatch):
    from tests.benchmark import __main__ as tool

    plan = replace(quick_plan(), growing_ranks=(1,))
    monkeypatch.setattr(tool, "quick_plan", lambda: plan)
    monkeypatch.setattr(tool, "RankPool", lambda *_, **__: nullcontext(torch_pool))  # They run, so why start others.
    tool.main(["--quick", "--repetitions", "2", "--dtypes", "float32", "--no-mindspore", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {
        "benchmark.md",
        "benchmark.json",
        "benchmark.png",
        "growth.png",
    }
    results = json.loads((tmp_path / "benchmark.json").read_text())
    assert len(results["works"]) == 6
    text = (tmp_path / "benchmark.md").read_text()
    assert "experts, fp32, (2, 2)" in text and "TorchTitan" in text and results["machine"] in text


def test_the_worked_example_of_the_documents():
    from tests.benchmark import model
    from tests.benchmark.settings import Shape

    experts, moe = (Work(layer, "float32", 2, 2, Shape()) for layer in ("experts", "moe"))
    assert [round(n / 1e9, 1) for n in model.flops(experts)] == [12.9, 25.8]
    mib = 2**20
    assert model.payload(experts)["tp"] == (16 * mib, 16 * mib)
    assert model.payload(moe)["tp"] == (4 * mib, 4 * mib + 32 * 1024)
    assert model.payload(moe)["ep"] == (32 * mib + 8 * 16, 32 * mib)
    assert round(model.kept_bytes(experts) / mib, 1) == 48.1
