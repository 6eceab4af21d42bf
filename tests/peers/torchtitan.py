"""TorchTitan 0.2.2's MoE modules on a CPU, for comparisons.

    pip install --no-deps torchtitan==0.2.2

The package as a whole wants a GPU and many dependencies. Its three MoE files need only a few names of the rest, which
are stood in for while they load. Two things do not run on a CPU and are exchanged for what does: the Triton kernel for
indices (TorchTitan's own CPU version takes its place) and ``torch.histc`` of integers.
"""

import importlib.util
import logging
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

__all__ = ["installed", "load", "integer_histc"]


def installed():
    return importlib.util.find_spec("torchtitan") is not None


def load():
    """GroupedExperts, MoE, MoEArgs and the styles; leaves no stand-in behind in ``sys.modules``."""
    root = Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0])
    stand_ins = {
        "torchtitan": {},
        "torchtitan.models": {},
        "torchtitan.models.moe": {},
        "torchtitan.tools": {},
        "torchtitan.models.utils": {"trunc_normal_": torch.nn.init.trunc_normal_},
        "torchtitan.tools.logging": {"logger": logging.getLogger("torchtitan")},
        "torchtitan.tools.utils": {"_round_up": lambda x, multiple: -(-x // multiple) * multiple},
        "triton.language": {"constexpr": int},
    }
    modules = {name: _stand_in(name, **names) for name, names in stand_ins.items()}
    modules["triton"] = _stand_in("triton", jit=lambda kernel: kernel, language=modules["triton.language"])
    with mock.patch.dict(sys.modules, modules):
        kernels = _execute("torchtitan.models.moe.kernels", root / "models/moe/kernels.py")
        kernels.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)
        _execute("torchtitan.models.moe.utils", root / "models/moe/utils.py")
        moe = _execute("torchtitan.models.moe.moe", root / "models/moe/moe.py")
        styles = _execute("torchtitan.distributed.expert_parallel", root / "distributed/expert_parallel.py")
    return SimpleNamespace(
        GroupedExperts=partial(moe.GroupedExperts, use_grouped_mm=False),
        MoE=moe.MoE,
        MoEArgs=moe.MoEArgs,
        ExpertParallel=styles.ExpertParallel,
        ExpertTensorParallel=styles.ExpertTensorParallel,
    )


@contextmanager
def integer_histc():
    """``torch.histc`` that counts integers, as TorchTitan's router asks of a GPU."""
    histc = torch.histc

    def call(values, bins, min, max):
        if values.is_floating_point():
            return histc(values, bins=bins, min=min, max=max)
        return torch.bincount(values, minlength=bins)

    with mock.patch.object(torch, "histc", call):
        yield


def _stand_in(name, **names):
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(names)
    return module


def _execute(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
