"""Which platform is chosen, each case in a process of its own. Some need both frameworks installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

BOTH = all(importlib.util.find_spec(name) for name in ("torch", "mindspore"))
needs_both = pytest.mark.skipif(not BOTH, reason="needs both frameworks")


def run(script, **environment):
    cleaned = {key: value for key, value in os.environ.items() if key != "HYPER_PARALLEL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env={**cleaned, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_no_framework():
    script = "import sys, hyper_parallel as hp; hp.ExpertTensorParallel(); hp.Shard(0); hp.parallelize_module; dir(hp);"
    assert run(script + "print(*({'torch', 'mindspore'} & set(sys.modules)))") == []


@needs_both
@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_set_platform_and_environment(name):
    other = {"torch": "mindspore", "mindspore": "torch"}[name]
    script = "import sys, hyper_parallel as hp; print(hp.get_platform().name, hp.GroupedExperts.__module__)"
    expected = [name, f"hyper_parallel.platform.{name}.modules"]
    assert run(script, HYPER_PARALLEL_PLATFORM=name) == expected
    assert run(script.replace("print", f"hp.set_platform('{name}'); print"), HYPER_PARALLEL_PLATFORM=other) == expected
    # Only the chosen framework was imported.
    assert run(f"{script}; print('{other}' in sys.modules)", HYPER_PARALLEL_PLATFORM=name) == [*expected, "False"]


@needs_both
def test_the_imported_one_then_mindspore():
    script = "import hyper_parallel as hp; print(hp.get_platform().name)"
    assert run("import torch;" + script) == ["torch"]
    assert run("import mindspore;" + script) == ["mindspore"]
    assert run("import torch, mindspore;" + script) == ["mindspore"]
    assert run(script) == ["mindspore"]


@needs_both
def test_the_object_decides():
    script = (
        "import torch, mindspore, hyper_parallel as hp; hp.set_platform('mindspore');"
        "print(*(hp.get_platform(obj).name for obj in"
        " (torch.nn.Linear(1, 1), torch.zeros(1), mindspore.nn.Dense(1, 1), mindspore.Tensor([1]))))"
    )
    assert run(script) == ["torch", "torch", "mindspore", "mindspore"]


@needs_both
def test_both_frameworks_compute_in_one_process():
    script = """
import numpy as np, torch, mindspore, hyper_parallel as hp
rng = np.random.default_rng(0)
weights = {"w1": (2, 4, 3), "w2": (2, 3, 4), "w3": (2, 4, 3)}
weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
x, counts = rng.standard_normal((5, 3)).astype(np.float32), np.array([2, 3])
outputs = []
for name in ("torch", "mindspore"):
    hp.set_platform(name)
    experts = hp.GroupedExperts(3, 4, 2)
    tensor = torch.tensor if name == "torch" else mindspore.Tensor
    for key, value in weights.items():
        weight = getattr(experts, key)
        weight.data.copy_(tensor(value)) if name == "torch" else weight.set_data(tensor(value))
    y = experts(tensor(x), tensor(counts))
    outputs.append(y.detach().numpy() if name == "torch" else y.asnumpy())
print(abs(outputs[0] - outputs[1]).max() < 1e-5, abs(outputs[0]).max() > 0.1)
"""
    assert run(script) == ["True", "True"]
