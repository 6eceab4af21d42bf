"""The examples of docs/planner.md print what stands below them."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from hyper_parallel.plan import OPTIMIZERS, read_cluster

PAGE = (Path(__file__).resolve().parents[3] / "docs/planner.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.parametrize("source,expected", EXAMPLES, ids=["a program", "EP wins", "ETP wins"])
def test_example(source, expected):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "docs/planner.md", "exec"), {})
    assert out.getvalue() == expected


def test_one_example_is_won_by_ep_and_one_by_etp():
    assert EXAMPLES[1][1].startswith("Take plain EP") and "which does not fit" in EXAMPLES[2][1].splitlines()[-1]
    assert re.match(r"Take \w*ExpertTensorParallel: dp\d+ ep\d+ tp2", EXAMPLES[2][1])


def test_the_cluster_of_the_page_can_be_read():
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.S | re.M)
    assert read_cluster(json.loads(text)).name == "mine"


def test_bytes_per_parameter_are_those_of_the_page():
    rows = dict(re.findall(r"^\| `(adamw[\w-]*)` \|.*\| (\d+) \|$", PAGE, re.M))
    found = {name: 2 + optimizer.gradient_bytes(2) + optimizer.state_bytes(2) for name, optimizer in OPTIMIZERS.items()}
    assert {name: int(n) for name, n in rows.items()} == {n: b for n, b in found.items() if n.startswith("adamw")}
