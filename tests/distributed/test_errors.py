"""Every documented error: its type, what it says, that every rank raises it, and that nothing had changed before it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.distributed import error_cases as cases
from tests.harness import oracle


def expect(outcome, kind, *words):
    assert outcome is not None, f"nothing was raised, expected {kind} with {words}"
    name, message = outcome
    assert name == kind, f"{name}: {message}"
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def test_meshes_that_do_not_fit(pool):
    received = {
        "swapped": "('tp', 'ep')",
        "etp": "('ep', 'etp')",
        "unnamed": "None",
        "one": "('ep',)",
        "three": "('dp', 'ep', 'tp')",
    }
    for results in pool.run(cases.wrong_meshes):
        for key, names in received.items():
            error, unchanged, collectives = results[key]
            expect(error, "ValueError", "2-D mesh with names ('ep', 'tp')", names, "mesh['ep', 'tp']")
            assert unchanged and collectives == 0
        assert "slice it" in results["three"][0][1]


def test_modules_that_cannot_be_sharded(pool):
    expected = {
        "num_experts": ("ValueError", "num_experts (6) must be divisible by the ep degree (4)"),
        "hidden_dim": ("ValueError", "hidden_dim (7) must be divisible by the tp degree (4)"),
        "missing": ("ValueError", "w3 missing", "['w1', 'w2']"),
        "shapes": ("ValueError", "w2 of shape [E, D, H]", "w2 (8, 8, 4)"),
        "bias": ("ValueError", "w2_bias"),
        "other bias": ("ValueError", "gain"),
        "no module": ("TypeError", "str"),
        "no mesh": ("TypeError", "mesh", "tuple"),
        "patched": ("ValueError", "forward was replaced"),
    }
    for results in pool.run(cases.wrong_modules):
        for key, (kind, *words) in expected.items():
            error, unchanged, collectives = results[key]
            expect(error, kind, *words)
            assert unchanged and collectives == 0, key


def test_second_apply(pool):
    for results in pool.run(cases.second_apply):
        assert len(results) == 9
        for (first, _), (error, unchanged, collectives) in results.items():
            expect(error, "RuntimeError", f"already parallelised by {first}")
            assert unchanged and collectives == 0


def test_calls_that_do_not_fit(pool):
    problem = oracle.make_problem(2, 4, 6, 8, counts=[[4, 3, 5, 4], [2, 6, 3, 5]])
    expected = {
        "sum": ("ValueError", "sums to 20", "16 rows"),
        "negative": ("ValueError", "must not be negative", "-1"),
        "length": ("ValueError", "4 experts", "(3,)"),
        "shape": ("ValueError", "4 experts", "(1, 4)"),
        "float": ("ValueError", "integers"),
        "list": ("TypeError", "num_tokens_per_expert", "list"),
        "numpy": ("TypeError", "x must be a plain", "ndarray"),
        "width": ("ValueError", "[rows, 6]", "(16, 5)"),
        "scores": ("ValueError", "scores must have shape [16]", "(15,)"),
    }
    for results in pool.run(cases.wrong_calls, ep=2, tp=2, problem=problem):
        for key, (kind, *words) in expected.items():
            error, collectives = results[key]
            expect(error, kind, *words)
            assert collectives == 0, key
        expect(results["dtype"][0], "ValueError", "rows are", "weights")


def test_plans_that_do_not_fit(pool):
    for results, unchanged in pool.run(cases.wrong_plans):
        expect(results["unknown"], "ValueError", "'layers.*.expert' matches no module", "'layers.0.experts'")
        expect(results["second unknown"], "ValueError", "'head' matches no module")
        expect(results["no plan"], "TypeError", "dict of name pattern to style")
        expect(results["twice"], "RuntimeError", "more than once", "layers.0.experts")
        expect(results["one cannot"], "ValueError", "layers.1", "missing")
        assert unchanged


def test_meshes_that_cannot_be(pool):
    for results in pool.run(cases.wrong_meshes_at_creation):
        expect(results["size"], "ValueError", "8 ranks", "4 are running")
        expect(results["names"], "ValueError", "('ep', 'tp')", "(4,)")
        expect(results["same names"], "ValueError", "must differ")


def test_layouts_that_cannot_be(pool):
    for results in pool.run(cases.wrong_layouts):
        expect(results["number"], "ValueError", "one placement per mesh axis (2)", "got 1")
        expect(results["partial"], "ValueError", "Partial")
        expect(results["dim"], "ValueError", "(6, 8)")
        expect(results["divisible"], "ValueError", "dim 0 of size 6", "4 ranks")
        expect(results["placement"], "TypeError", "'tp'")


def test_mixed_frameworks(pool):
    if not all(importlib.util.find_spec(name) for name in ("torch", "mindspore")):
        pytest.skip("needs both frameworks")
    for results in pool.run(cases.mixed_frameworks):
        expect(results["mesh"], "TypeError", "mesh")
        expect(results["rows"], "TypeError", "x must be a plain")
        expect(results["counts"], "TypeError", "num_tokens_per_expert must be a plain")
        expect(results["tensor"], "TypeError", "device mesh")
        assert results["modules are the platforms' own"]


WITHOUT_RANKS = {
    "hp.init_device_mesh('cpu', (1, 1), mesh_dim_names=('ep', 'tp'))": ("RuntimeError", "not initialised"),
    "hp.set_platform('jax')": ("ValueError", "unknown platform 'jax'", "mindspore, torch"),
    "hp.get_platform('a string')": ("TypeError", "str"),
    "os.environ['HYPER_PARALLEL_PLATFORM'] = 'pytorch'; hp.set_platform(None); hp.get_platform()": (
        "ValueError",
        "unknown platform 'pytorch'",
        "HYPER_PARALLEL_PLATFORM",
    ),
}


def test_without_ranks(platform):
    """All in one process: importing a framework takes longer than the rest of this file's own work."""
    setup = "import mindspore; mindspore.set_device('CPU')" if platform == "mindspore" else "import torch"
    program = f"""
import json, os, hyper_parallel as hp
{setup}
hp.set_platform('{platform}')
found = {{}}
for script in {list(WITHOUT_RANKS)!r}:
    try:
        exec(script)
    except Exception as error:
        found[script] = type(error).__name__, str(error)
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for script, (kind, *words) in WITHOUT_RANKS.items():
        expect(found.get(script), kind, *words)
