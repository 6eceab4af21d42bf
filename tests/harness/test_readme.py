"""tests/README.md shows a test that runs, and names what is there."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
README = (TESTS / "README.md").read_text(encoding="utf-8")


def test_the_first_test_is_the_one_that_runs():
    (shown,) = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    assert shown == (TESTS / "distributed" / "test_first.py").read_text(encoding="utf-8")


def test_every_file_that_is_named_exists():
    links = re.findall(r"\]\(([\w/]+\.\w+)\)", README)
    named = re.findall(r"\btests/[\w/]+(?:\.\w+)?", README)
    helpers = re.findall(r"`(\w+\.py)`", README.split("| in `tests/harness` |")[1].split("\n\n")[0])
    assert len(links) > 4 and len(named) > 8 and len(helpers) > 8
    missing = [name for name in links if not (TESTS / name).exists()]
    missing += [name for name in named if not (TESTS.parent / name).exists()]
    assert not missing + [name for name in helpers if not (TESTS / "harness" / name).exists()]
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and (path / "__init__.py").exists()} <= {
        name.removeprefix("tests/") for name in named
    }
