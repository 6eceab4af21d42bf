"""The complete examples of the README and of docs/ run as they are: the README's by the launchers of platform/, the
others on ranks of a pool that find what a launcher gives them.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.harness.launching import launch
from tests.harness.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(document):
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M)


def examples_of_docs():
    """name -> (platform, code) of each, once where two languages show it; its first line says where it runs."""
    names = {}
    for document in sorted(ROOT.glob("docs/*.md")):
        for number, code in enumerate(python_blocks(document)):
            if re.match(r"# Runs on 4 (torch|MindSpore) ranks\.\n", code):
                names.setdefault(code, []).append(f"{document.name}-{number}")
    return {", ".join(where): (code.split()[4].lower(), code) for code, where in names.items()}


EXAMPLES = examples_of_docs()


def run_example(context, script, folder):
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")


def test_examples_are_found():
    assert {platform for platform, _ in EXAMPLES.values()} == {"torch", "mindspore"}
    assert len(EXAMPLES) >= 8


@pytest.mark.slow
def test_memory_of_mindspores_operators_grows(tmp_path):
    """The page on it is out of date when this no longer holds."""
    require("mindspore")
    blocks = python_blocks(ROOT / "docs" / "performance.md")
    (example,) = (block for block in blocks if block.startswith("# Runs in one MindSpore process."))
    for code, expected in ((example, True), (example.replace("product(x, x)", "x * x"), False)):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        per_product = [float(number) for number in re.findall(r"(-?[\d.]+) KB per product", run.stdout)]
        assert len(per_product) == 3 and (min(per_product) > 0.5) == expected, run.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    platform, code = EXAMPLES[name]
    require(platform)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    with RankPool(platform, 4, joined=False) as pool:
        pool.run(run_example, time_limit_s=200, script=str(script), folder=str(tmp_path))


@pytest.mark.ranks
@pytest.mark.parametrize("number,platform", [(0, "torch"), (1, "mindspore")])
def test_the_readme_as_a_user_starts_it(number, platform, tmp_path):
    require(platform)
    script = tmp_path / "example.py"
    script.write_text(python_blocks(ROOT / "README.md")[number], encoding="utf-8")

    ((exit_code, output),) = launch(platform, 4, [script], tmp_path)

    assert exit_code == 0, output[-8000:]
    lines = re.findall(r"rank (\d): w1 \(4, 32, 16\), here \(2, 16, 16\); difference from one device (\S+)", output)
    assert {rank for rank, _ in lines} == {"0", "1", "2", "3"}, output[-4000:]
    assert all(float(difference) < 1e-6 for _, difference in lines)
