"""TorchTitan 0.2.2's MoE modules on a CPU, for comparisons.

    pip install --no-deps torchtitan==0.2.2

The package as a whole wants a GPU and many dependencies. Its MoE files, and its Llama 4, need only a few names of the
rest, which are stood in for while they load. Two things do not run on a CPU and are exchanged for what does: the Triton
kernel for indices (TorchTitan's own CPU version takes its place) and ``torch.histc`` of integers.
"""

import functools
import importlib.util
import logging
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

__all__ = ["installed", "load", "load_llama4", "integer_histc"]


def installed():
    return importlib.util.find_spec("torchtitan") is not None


def load():
    """GroupedExperts, MoE, MoEArgs and the styles; leaves no stand-in behind in ``sys.modules``."""
    with _stand_ins():
        moe, styles = _load_moe()
    return SimpleNamespace(
        GroupedExperts=partial(moe.GroupedExperts, use_grouped_mm=False),
        MoE=moe.MoE,
        MoEArgs=moe.MoEArgs,
        ExpertParallel=styles.ExpertParallel,
        ExpertTensorParallel=styles.ExpertTensorParallel,
    )


def load_llama4(edits=()):
    """The Llama 4 model and its plan, whose text is edited first: pairs of what stands there once, and what takes its
    place."""
    with _stand_ins():
        moe, _ = _load_moe()
        sys.modules["torchtitan.models.moe"].moe = moe
        vars(sys.modules["torchtitan.models.moe"]).update(vars(moe))
        _execute("torchtitan.models.attention", _root() / "models/attention.py")
        _execute("torchtitan.distributed", _root() / "distributed/__init__.py")
        args = _execute("torchtitan.models.llama4.model.args", _root() / "models/llama4/model/args.py")
        model = _execute("torchtitan.models.llama4.model.model", _root() / "models/llama4/model/model.py")
        plan = _execute(
            "torchtitan.models.llama4.infra.parallelize", _root() / "models/llama4/infra/parallelize.py", edits
        )
    return SimpleNamespace(
        Transformer=model.Transformer,
        TransformerModelArgs=args.TransformerModelArgs,
        MoEArgs=moe.MoEArgs,
        apply_non_moe_tp=plan.apply_non_moe_tp,
        apply_moe_ep_tp=plan.apply_moe_ep_tp,
    )


def _load_moe():
    language = _stand_in("triton.language", constexpr=int)
    triton = _stand_in("triton", jit=lambda kernel: kernel, language=language)
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        kernels = _execute("torchtitan.models.moe.kernels", _root() / "models/moe/kernels.py")
    sys.modules[kernels.__name__] = kernels
    kernels.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)
    _execute("torchtitan.models.moe.utils", _root() / "models/moe/utils.py")
    moe = _execute("torchtitan.models.moe.moe", _root() / "models/moe/moe.py")
    return moe, _execute("torchtitan.distributed.expert_parallel", _root() / "distributed/expert_parallel.py")


@functools.cache
def _root():
    return Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0])


class _ModelProtocol(torch.nn.Module):
    def __init__(self, model_args):
        super().__init__()


@contextmanager
def _stand_ins():
    """Names of the rest of the package that the files import."""
    _root()  # cannot be found once the package itself is stood in for
    unused = dict.fromkeys(
        ("JobConfig", "Compile", "ParallelDims", "DualPipeExpertParallel", "BaseTokenizer", "AttentionMasksType"),
        object,
    )
    unused |= dict.fromkeys(("apply_ac", "apply_cp_to_attention_module", "get_dual_pipe_v_flag", "apply_ddp"))
    unused |= dict.fromkeys(("maybe_enable_async_tp", "disable_fsdp_gradient_division", "TORCH_DTYPE_MAP"))
    unused |= dict.fromkeys(("get_moe_model_nparams_and_flops", "has_cuda_capability"))
    used = {
        "trunc_normal_": torch.nn.init.trunc_normal_,
        "logger": logging.getLogger("torchtitan"),
        "_round_up": lambda x, multiple: -(-x // multiple) * multiple,
        "BaseModelArgs": object,
        "ModelProtocol": _ModelProtocol,
    }
    packages = (
        "torchtitan",
        "torchtitan.components",
        "torchtitan.components.tokenizer",
        "torchtitan.config",
        "torchtitan.config.job_config",
        "torchtitan.distributed.activation_checkpoint",
        "torchtitan.distributed.context_parallel",
        "torchtitan.distributed.dual_pipe_v",
        "torchtitan.distributed.parallel_dims",
        "torchtitan.distributed.tensor_parallel",
        "torchtitan.models",
        "torchtitan.models.llama3.infra.parallelize",
        "torchtitan.models.llama4.model",
        "torchtitan.models.moe",
        "torchtitan.models.utils",
        "torchtitan.protocols",
        "torchtitan.protocols.model",
        "torchtitan.protocols.train_spec",
        "torchtitan.tools",
        "torchtitan.tools.logging",
        "torchtitan.tools.utils",
    )
    modules = {name: _stand_in(name, **unused, **used) for name in packages}
    sys.modules.update(modules)
    try:
        yield
    finally:  # these, and not all of sys.modules as it was: parts of torch may have come in
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]


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


def _execute(name, path, edits=()):
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        text = text.replace(old, new)
    module = ModuleType(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module
