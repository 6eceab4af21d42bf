"""The check of a cluster, run on the pool's ranks with parts of the library broken."""

import contextlib
import importlib
import io
from unittest import mock

import numpy as np

from hyper_parallel import check
from hyper_parallel.check import operations
from tests.harness.setting import get_platform_class, sabotage


def run_check(context, arguments=(), breaks=(), on_ranks=None):
    """Exit code, output and error output of this rank; the breaks are made on ``on_ranks`` or on all."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in breaks if on_ranks is None or context.rank in on_ranks else ():
            stack.enter_context(_break(context, name))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        code = check.main(["--device", context.framework.device_type, *arguments])
    return code, output.getvalue(), errors.getvalue()


def _break(context, name):
    platform = get_platform_class(context.platform)
    session = importlib.import_module(f"hyper_parallel.platform.{context.platform}.session")
    if name == "drop_tp_sum":
        return sabotage(context, name)
    if name == "description":
        return mock.patch.object(session, "description", lambda device_type: {"torch": "another"})
    if name == "distribute_tensor":
        return mock.patch.object(operations, name, lambda *args: _Zeros(distribute_tensor(*args)))
    if name == "error":
        return mock.patch.object(platform, "sum_over_group", mock.Mock(side_effect=RuntimeError("no link")))
    if name.startswith("last element"):
        return _last_element(platform, large=name.endswith("8 MB"))
    original = getattr(platform, name)

    def zeros(self, *args):
        result = original(self, *args)
        return _ZerosOnceWaited(result) if hasattr(result, "wait") else result * 0

    return mock.patch.object(platform, name, zeros)


def _last_element(platform, large):
    """A transport that gets the last number of a message wrong where it is larger than 1 MB, or in bfloat16."""

    def spoilt(verb):
        original = getattr(platform, verb)

        def call(self, x, *args):
            result = original(self, x, *args)
            chosen = result.nbytes > 2**20 if large else str(result.dtype).lower().endswith("bfloat16")
            if not chosen:
                return result
            # + 1 at the last place, in what both frameworks' tensors have.
            width = result.shape[-1]
            column = platform_tensor(result, np.arange(width) == width - 1)
            return result + column

        return call

    return mock.patch.multiple(platform, **{verb: spoilt(verb) for verb in ("all_to_all_rows", "sum_over_group")})


def platform_tensor(like, values):
    """Numbers as a tensor of the dtype of ``like``."""
    if type(like).__module__.startswith("torch"):
        import torch

        return torch.tensor(values).to(like.dtype)
    import mindspore

    return mindspore.Tensor(values.astype(np.float32)).astype(like.dtype)


distribute_tensor = operations.distribute_tensor


class _Zeros:
    def __init__(self, sharded):
        self._sharded = sharded

    def to_local(self):
        return self._sharded.to_local() * 0

    def full_tensor(self):
        return self._sharded.full_tensor() * 0


class _ZerosOnceWaited:
    def __init__(self, arriving):
        self._arriving = arriving

    def wait(self):
        return self._arriving.wait() * 0
