"""The tables of measured ratios in the documents are those of the benchmark's latest run."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmark.report import DTYPE_NAMES, LAYER_NAMES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "docs/benchmark/benchmark.json").read_text(encoding="utf-8"))
WORKS = {(work["layer"], work["dtype"], tuple(work["mesh"])): work for work in RESULTS["works"]}
OUTDATED = "docs/benchmark/benchmark.json is of another run than this document's table: bring the table up to date"


def median(work, pair):
    return f"{work['ratios'][pair]['both'][1]:.2f}"


def kept(work):
    return f"{work['memory']['ours']['kept'] / work['memory']['titan']['kept']:.2f}"


@pytest.mark.parametrize("document", ["README.md", "README.zh.md"])
def test_readme(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    rows = re.findall(r"^\| \((\d), (\d)\) \|(.*)\|$", text, re.M)
    found = {(int(ep), int(tp)): [cell.strip() for cell in cells.split("|")] for ep, tp, cells in rows}
    columns = [("experts", "float32"), ("moe", "float32"), ("experts", "bfloat16"), ("moe", "bfloat16")]
    meshes = {mesh for _, _, mesh in WORKS}
    measured = {mesh: [median(WORKS[(*column, mesh)], "ours / titan") for column in columns] for mesh in meshes}
    assert found == measured and RESULTS["date"] in text, OUTDATED


def test_performance():
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (?:experts|MoE layer) \| \w+ \| \(\d, \d\) .*\|$", text, re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    pairs = "ours / floor", "titan / floor", "ours / titan"
    measured = [
        [LAYER_NAMES[layer], DTYPE_NAMES[dtype], str(mesh), *(median(work, pair) for pair in pairs), kept(work)]
        for (layer, dtype, mesh), work in WORKS.items()
    ]
    assert rows == measured, OUTDATED
