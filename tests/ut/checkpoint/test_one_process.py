"""Checkpoints of one process without a process group: deaths, misfits, memory, dtypes, threads."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint import __main__ as command
from hyper_parallel.checkpoint import saving
from tests.conftest import require

require_torch = pytest.fixture(autouse=True, scope="module")(lambda: require("torch"))
ROOT = Path(__file__).resolve().parents[3]


def a_module(seed=0, **sizes):
    import torch

    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in (sizes or {"a": (3, 4)}).items()})


def stepped(module, optimizer):
    sum(parameter.square().sum() for parameter in module.parameters()).backward()
    optimizer.step()
    return module


def values(module):
    return {name: value.read().copy() for name, value in saving.room_of(module).model_values(module).items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_all_types_come_back_bit_by_bit(tmp_path):
    import torch

    def holder(fill):
        module = torch.nn.Module()
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.float64,
            torch.int8,
            torch.bool,
            torch.int64,
        ):
            name = str(dtype).replace("torch.", "as_")
            numbers = torch.arange(10) - 3 if fill else torch.zeros(10)
            module.register_buffer(name, numbers.to(dtype).reshape(2, 5))
        module.scalar = torch.nn.Parameter(torch.tensor(2.5 if fill else 0.0))
        module.register_buffer("none", torch.zeros(0, 3))
        module.register_buffer("not_saved", torch.zeros(3), persistent=False)
        module.transposed = torch.nn.Parameter((torch.arange(6.0) * fill).reshape(2, 3).T)
        return module

    one, other = holder(True), holder(False)
    checkpoint.save(tmp_path / "a", one, step=7)
    assert checkpoint.load(tmp_path / "a", other) == 7
    assert same(values(one), values(other)) and "not_saved" not in values(one)
    assert other.as_bfloat16.tolist() == one.as_bfloat16.tolist() and other.scalar.item() == 2.5


def test_every_optimizer_goes_on(tmp_path):
    import torch

    makers = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
        "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        "Adagrad": lambda p: torch.optim.Adagrad(p),
        "NAdam": lambda p: torch.optim.NAdam(p),
        "Adadelta": lambda p: torch.optim.Adadelta(p),
    }
    for name, make in makers.items():
        one, other = a_module(0), a_module(1)
        # A scalar parameter, and one that never gets a gradient.
        for module in (one, other):
            module.scale = torch.nn.Parameter(torch.tensor(2.0))
            module.idle = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        first, second = make(one.parameters()), make(other.parameters())
        stepped(stepped(one, first), first)
        checkpoint.save(tmp_path / name, one, first)
        checkpoint.load(tmp_path / name, other, second)
        first.zero_grad(), second.zero_grad()
        assert same(values(stepped(one, first)), values(stepped(other, second))), name


def test_another_optimizer_is_refused(tmp_path):
    import torch

    module = a_module()
    stepped_adam = torch.optim.AdamW(module.parameters())
    stepped(module, stepped_adam)
    checkpoint.save(tmp_path / "a", module, stepped_adam)
    with pytest.raises(checkpoint.CheckpointError, match=r"exp_avg\.a\.weight: in the checkpoint, not here"):
        checkpoint.load(tmp_path / "a", module, torch.optim.SGD(module.parameters(), momentum=0.9))
    with pytest.raises(checkpoint.CheckpointError, match="use the same optimizer"):
        checkpoint.load(tmp_path / "a", module, torch.optim.Adamax(module.parameters()))
    with pytest.raises(checkpoint.CheckpointError, match="2 parameters that are not the module's"):
        checkpoint.save(tmp_path / "b", module, torch.optim.SGD(a_module().parameters()))
    checkpoint.save(tmp_path / "a", module)
    with pytest.raises(checkpoint.CheckpointError, match="holds no optimizer state"):
        checkpoint.load(tmp_path / "a", module, stepped_adam)


def test_all_misfits_are_listed_together_and_nothing_is_loaded(tmp_path):
    checkpoint.save(tmp_path / "a", a_module(0, kept=(2, 2), wider=(3, 4), gone=(2, 2), cast=(2, 2)))
    module = a_module(1, kept=(2, 2), wider=(3, 5), new=(2, 2), cast=(2, 2))
    module["cast"].half()
    before = values(module)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(tmp_path / "a", module)
    for line in (
        "model wider.weight: (4, 3) in the checkpoint, (5, 3) here",
        "model new.bias: not in the checkpoint",
        "model gone.bias: in the checkpoint, not here",
        "model cast.weight: F32 in the checkpoint, F16 here",
        "cast the module to the checkpoint's dtype",
    ):
        assert line in str(caught.value)
    assert same(before, values(module))


DEATHS = """
import os, sys, torch
from hyper_parallel import checkpoint
from tests.harness.deaths import died
torch.set_num_threads(1)
folder = sys.argv[1]
module = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
module(torch.ones(3)).sum().backward(); optimizer.step()
checkpoint.save(folder, module, optimizer, step=1)
for at in range(1, 1000):
    if not died(at, "checkpoints", lambda: checkpoint.save(folder, module, optimizer, step=at + 1)):
        break
    found = checkpoint.load(folder, torch.nn.Linear(3, 4))
    assert found == 1 or found == at + 1, (at, found)
    print(at, found)
    checkpoint.save(folder, module, optimizer, step=1)
assert checkpoint.load(folder, torch.nn.Linear(3, 4)) == at + 1
assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)], os.listdir(os.path.dirname(folder))
"""


def test_a_save_that_dies_at_any_point_leaves_a_whole_checkpoint(tmp_path):
    """Killed before every single operation on files in turn; the previous checkpoint, or the new one, can be loaded."""
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", DEATHS, str(tmp_path / "checkpoints" / "a")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ, PYTHONPATH=str(ROOT))
    )
    assert done.returncode == 0, done.stderr
    survivors = [line.split() for line in done.stdout.splitlines()]
    assert len(survivors) > 15
    assert {found == "1" for _, found in survivors} == {True, False}  # died before the exchange, and after it


def test_loading_takes_the_memory_of_one_tensor(tmp_path):
    """Beside the module: what the largest tensor takes, and not what all take."""
    sizes = {f"layer{number}": (512, 512) for number in range(8)}
    one, other = a_module(0, **sizes), a_module(1, **sizes)
    tensor = 512 * 512 * 4
    checkpoint.save(tmp_path / "first", a_module())  # what is imported on the way does not count
    checkpoint.load(tmp_path / "first", a_module())
    for action in (lambda: checkpoint.save(tmp_path / "a", one), lambda: checkpoint.load(tmp_path / "a", other)):
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2.5 * tensor, peak / tensor  # the checksums' buffer of 1 MiB included
    assert same(values(one), values(other))


def test_asynchronous_errors_come_with_wait(tmp_path, monkeypatch):
    module = a_module()
    checkpoint.save(tmp_path / "a", module, step=1)

    def no_space(path, slices, advance):
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "write_file", no_space)
    handle = checkpoint.save(tmp_path / "a", module, step=2, asynchronous=True)
    with pytest.raises(checkpoint.CheckpointError, match="still being written"):
        checkpoint.save(tmp_path / "a", module)
    with pytest.raises(checkpoint.CheckpointError, match="no space left on device"):
        handle.wait()
    handle.wait()
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "a", module) == 1
    handle = checkpoint.save(tmp_path / "a", module, step=3, asynchronous=True)
    handle.wait()
    assert handle.done() and checkpoint.load(tmp_path / "a", module) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_names_of_wrappers_and_tied_weights(tmp_path):
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = a_module(0, a=(3, 3), b=(3, 3))
    module["b"].weight = module["a"].weight
    wrapped = torch.nn.ModuleDict({name: checkpoint_wrapper(layer) for name, layer in module.items()})
    checkpoint.save(tmp_path / "a", wrapped)
    other = a_module(1, a=(3, 3), b=(3, 3))
    other["b"].weight = other["a"].weight
    checkpoint.load(tmp_path / "a", other)
    assert same(values(module), values(other)) and list(values(module)) == ["a.weight", "a.bias", "b.bias"]


def test_command_line(tmp_path, capsys):
    from safetensors.torch import load_file

    module = a_module(0, a=(3, 4), b=(4, 2))
    checkpoint.save(tmp_path / "a", module, step=12)
    assert command.main(["inspect", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    for words in ("1 rank(s) of torch", "step: 12", "a.weight", "F32", "[4, 3]"):
        assert words in said
    assert command.main(["consolidate", str(tmp_path / "a"), str(tmp_path / "whole")]) == 0
    found = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert found["b.weight"].equal(module["b"].weight)
    checkpoint.consolidate(tmp_path / "a", tmp_path / "files", max_file_bytes=40)
    assert len(list((tmp_path / "files" / "model").glob("*.safetensors"))) == 3
    assert (tmp_path / "files" / "model" / "model.safetensors.index.json").is_file()
    other = a_module(1, a=(3, 4), b=(4, 2))
    assert checkpoint.load(tmp_path / "files", other) == 12 and same(values(module), values(other))
    assert command.main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    assert command.main(["consolidate", str(tmp_path / "a"), str(tmp_path / "a")]) == 1


def test_wrong_objects():
    import torch

    with pytest.raises(TypeError, match="expected a module of torch"):
        checkpoint.save("nowhere", torch.zeros(3))
    with pytest.raises(checkpoint.CheckpointError, match="meta device"):
        checkpoint.save("nowhere", torch.nn.Linear(2, 2, device="meta"))
