"""Which platform is chosen, each case in a process of its own. Some need both frameworks installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

BOTH = all(importlib.util.find_spec(name) for name in ("torch", "mindspore"))
needs_both = pytest.mark.skipif(not BOTH, reason="needs both frameworks")


def run(script, **environment):
    """The lines that the script prints. Importing a framework takes seconds, so a process serves several questions."""
    cleaned = {key: value for key, value in os.environ.items() if key != "HYPER_PARALLEL_PLATFORM"}
    script = f"import os, sys, hyper_parallel as hp\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env={**cleaned, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_package_imports_no_framework():
    script = "hp.ExpertTensorParallel(); hp.Shard(0); hp.parallelize_module; dir(hp);"
    assert run(script + "print(*({'torch', 'mindspore'} & set(sys.modules)))") == [""]


@needs_both
@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_the_environment_chooses_and_only_that_is_imported(name):
    other = {"torch": "mindspore", "mindspore": "torch"}[name]
    script = f"print(hp.get_platform().name, hp.GroupedExperts.__module__, '{other}' in sys.modules)"
    assert run(script, HYPER_PARALLEL_PLATFORM=name) == [f"{name} hyper_parallel.platform.{name}.modules False"]


@needs_both
def test_mindspore_where_nothing_else_says_so():
    script = "for _ in range(2): print(hp.get_platform().name, 'torch' in sys.modules)"
    assert run(script) == ["mindspore False"] * 2


IN_ONE_PROCESS = """
import torch
print("only torch:", hp.get_platform().name)
import mindspore
print("both:", hp.get_platform().name)
for environment, chosen in (("torch", "mindspore"), ("mindspore", "torch")):
    os.environ["HYPER_PARALLEL_PLATFORM"] = environment
    hp.set_platform(chosen)
    print("chosen:", hp.get_platform().name, hp.GroupedExperts.__module__)
    hp.set_platform(None)
    print("environment:", hp.get_platform().name)
hp.set_platform("mindspore")
objects = torch.nn.Linear(1, 1), torch.zeros(1), mindspore.nn.Dense(1, 1), mindspore.Tensor([1])
print("objects:", *(hp.get_platform(obj).name for obj in objects))

import numpy as np
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
print("computed:", abs(outputs[0] - outputs[1]).max() < 1e-5, abs(outputs[0]).max() > 0.1)
"""


@needs_both
def test_both_in_one_process():
    """The one that is imported, else MindSpore; the object decides first, then `set_platform`, then the environment."""
    assert run(IN_ONE_PROCESS) == [
        "only torch: torch",
        "both: mindspore",
        "chosen: mindspore hyper_parallel.platform.mindspore.modules",
        "environment: torch",
        "chosen: torch hyper_parallel.platform.torch.modules",
        "environment: mindspore",
        "objects: torch torch mindspore mindspore",
        "computed: True True",
    ]
