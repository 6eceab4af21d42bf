"""``examples/train_matrix.py``: a few of its arrangements on running ranks, and the whole of it once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.distributed import example_cases

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = "ep 2 x tp 2, sequence parallel, recompute, accumulation"
WORDS = {
    "torch": ("dp 2 x tp 2", EVERYTHING, "dp 2 x ep 2, FSDP2, recompute, accumulation"),
    "mindspore": ("dp 2 x tp 2", EVERYTHING),
}


def test_arrangements_agree_with_one_device(pool):
    words = WORDS[pool.platform]
    for found in pool.run(example_cases.differences, words=words):
        expected = found["one device"]["losses"]
        assert set(found) == {"one device", *words} and len(expected) == 2
        for title in words:
            row = found[title]
            assert row["losses"] == pytest.approx(expected, rel=1e-5), title
            assert row["gradients"] < 1e-5 and row["weights"] < 1e-4, (title, row)


def test_a_sum_that_is_left_out_is_seen(torch_pool):
    words = WORDS["torch"]
    for found in torch_pool.run(example_cases.differences, words=words, sum_gradients=False):
        for title in words:
            assert found[title]["gradients"] > 0.1, (title, found[title])


@pytest.mark.ranks
def test_the_command(tmp_path):
    """It starts its ranks, draws, and tells of what differs by its exit code."""
    require("torch")
    options = ["--platform", "torch", "--steps", "1", "--only", "dp 4", "--without-sums", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "examples" / "train_matrix.py"), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    table = (tmp_path / "matrix.md").read_text(encoding="utf-8").splitlines()

    assert run.returncode == 1, run.stderr
    assert "1 of 2 arrangements agree with one device on torch." in run.stdout
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table if line.count("|") > 5}
    assert (verdicts["one device"], verdicts["dp 4"]) == ("reference", "DIFFERS")
    assert verdicts["one device, mixed precision"] == "agrees"
    assert (tmp_path / "matrix.png").stat().st_size > 10_000
