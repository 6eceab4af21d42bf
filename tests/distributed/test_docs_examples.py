"""The complete examples of the README and of docs/ run as they are, started by the launchers of platform/."""

import re
from pathlib import Path

import pytest

from tests.conftest import require
from tests.harness.launching import launch

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(document):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.S | re.M)


def complete_examples():
    """(name, platform, code) of each. In docs/ the first line of a complete block says where it runs."""
    for number, (platform, code) in enumerate(zip(("torch", "mindspore"), python_blocks("README.md"))):
        yield f"README.md-{number}", platform, code
    for document in sorted(ROOT.glob("docs/*.md")):
        for number, code in enumerate(python_blocks(document)):
            marked = re.match(r"# Runs on 4 (torch|MindSpore) ranks\.\n", code)
            if marked:
                yield f"{document.name}-{number}", marked[1].lower(), code


EXAMPLES = {name: (platform, code) for name, platform, code in complete_examples()}


def test_examples_are_found():
    assert {platform for platform, _ in EXAMPLES.values()} == {"torch", "mindspore"}
    assert len(EXAMPLES) >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    platform, code = EXAMPLES[name]
    require(platform)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")

    ((exit_code, output),) = launch(platform, 4, [script], tmp_path)

    assert exit_code == 0, output[-8000:]
    if name.startswith("README"):
        lines = re.findall(r"rank (\d): w1 \(4, 32, 16\), here \(2, 16, 16\); difference from one device (\S+)", output)
        assert {rank for rank, _ in lines} == {"0", "1", "2", "3"}, output[-4000:]
        assert all(float(difference) < 1e-6 for _, difference in lines)
