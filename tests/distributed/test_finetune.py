"""examples/finetune_hf.py as a user runs it, with few steps: every part, and losses that are one device's."""

import json
import subprocess
import sys

import pytest

from tests.conftest import require, require_transformers
from tests.harness.pool import ROOT


@pytest.mark.ranks
def test_a_whole_run_of_a_hugging_face_model(tmp_path):
    require("torch")
    require_transformers()
    command = [sys.executable, "examples/finetune_hf.py", "--steps", "8", "--mesh", "1,2,1", "--then", "1,1,2"]

    done = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=250)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    first, then = ([json.loads(line) for line in open(tmp_path / f"{part}.jsonl")] for part in ("first", "then"))
    assert [record.get("step") for record in first] == [0, 1, 2, 3, 4]  # and the rank is killed
    assert [record.get("step") for record in then] == [4, 5, 6, 7, None]  # from the checkpoint on
    assert first[0]["loss"] > then[-2]["loss"] > 2
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "below 0.001" in report and "NOT" not in report and "def read(self):" in report
    assert (tmp_path / "report.png").stat().st_size > 20_000
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "finetuned").iterdir()
    }
