"""The command: its outputs, its errors, and that it needs no framework."""

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.plan.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES["mixtral"]["config"]))
    return ["--config", str(path), "--ranks", "64", "--tokens", str(2**20), "--zero", "1"]


def test_table_and_reasons(given, capsys):
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "Take plain EP: dp8 ep8 tp1" in out and "Next:" in out and "Best with ep and tp: dp4 ep8 tp2" in out


def test_without_rich_the_table_is_plain(given, capsys, monkeypatch):
    original = builtins.__import__

    def refusing(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    assert main(given) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.split()[:4] == ["dp", "ep", "tp", "style"] and second.split()[:3] == ["8", "8", "1"]


def test_json_to_a_file_and_to_standard_output(given, capsys, tmp_path):
    path = tmp_path / "plans.json"
    assert main([*given, "--json", str(path)]) == 0
    capsys.readouterr()
    assert main([*given, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans == json.loads(path.read_text())["plans"] and len(plans) > 100


def test_picture(given, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plans.png"
    assert main([*given, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_explain_fills_the_formulas_in(given, capsys):
    assert main([*given, "--explain", "ep8tp2 etp none"]) == 0
    out = capsys.readouterr().out
    tokens = 2**20 // 32
    assert f"= {tokens} tokens" in out and "32 x 1 x 3 x 4096 x 7168 = 2,818,572,288 parameters" in out
    assert f"T K D b: dispatch = {tokens * 2 * 4096 * 2:,} bytes" in out
    assert 'mesh["ep", "tp"]' in out and "(4, 8, 2)" in out and "HCCL_BUFFSIZE=512" in out
    assert "none over tp" in out


@pytest.mark.parametrize("name", ["ep8tp2 etp none", "ep1tp64 tp none"])
def test_explain_sums_over_tp_what_sees_a_part_of_the_tokens(given, capsys, name):
    assert main([*given, "--sequence-parallel", "--explain", name]) == 0
    out = capsys.readouterr().out
    assert 'over mesh["dp", "ep", "tp"] for what sees 1/tp of the tokens' in out and "none over tp" not in out
    assert '{"layers.*.moe": MoESequenceParallel()}' in out


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--explain", "ep3"], "no plan 'ep3'; the meshes are ep1tp1"),
        (["--explain", "first"], 'a plan is named like "ep4tp2"'),
        (["--cluster", "nowhere"], "no cluster 'nowhere'"),
        (["--zipf", "-2"], "at least 0"),
        (["--load", "missing.json"], "missing.json"),
    ],
)
def test_errors_go_to_standard_error(given, capsys, arguments, message):
    assert main([*given, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_it_imports_no_framework(given):
    program = (
        "import sys; from hyper_parallel.plan.__main__ import main; main(sys.argv[1:]); "
        "print({'torch', 'mindspore', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
