"""One process of a `RankPool`: `python -m tests.harness.worker PLATFORM rank|"rank alone"|scheduler CHANNEL`."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from tests.harness.frameworks import framework
from tests.harness.pool import RankContext, RankError

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main(platform: str, role: str, channel: str) -> None:
    """Join the process group, unless alone; then answer case after case until the parent closes the channel."""
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(int(channel))
    end_with_parent()
    if connection.poll():
        return  # The channel is closed, since nothing is sent so early: the parent ended before it could be watched.
    if role == "scheduler":
        _join_mindspore()  # Does not return while there are ranks.
        return
    context = _join(platform) if role == "rank" else _alone(platform)
    connection.send(None)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # There is nobody left for whom the frameworks should take leave of each other.
        connection.send_bytes(_answer(context, request))


def end_with_parent() -> None:
    """A killed parent cannot end its ranks, so the kernel does, even while a framework holds the interpreter. Where the
    kernel cannot, the limit of the collectives and the closed channel end the ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(context: RankContext, request: bytes) -> bytes:
    try:
        name, kwargs = pickle.loads(request)
        return pickle.dumps(_function(name)(context, **kwargs))
    except BaseException as error:  # Whatever it is, the parent shows it.
        return pickle.dumps(_described(error))
    finally:
        # A case that caught its error itself may need it too; and on MindSpore 2.10 gradients of softmax in float64 are
        # wrong after some in float32 and in other shapes, unless the executor forgets those.
        context.framework.clear_after_error()


def _join(platform: str) -> RankContext:
    if platform == "mindspore":
        return RankContext(platform, *_join_mindspore(), framework(platform))
    if platform == "torch_npu":
        _take_npu()
    return RankContext("torch", *_join_torch("hccl" if platform == "torch_npu" else "gloo"), framework(platform))


def _alone(platform: str) -> RankContext:
    names = ("RANK_ID", "RANK_SIZE") if platform == "mindspore" else ("RANK", "WORLD_SIZE")
    return RankContext(platform, *(int(os.environ[name]) for name in names), framework(platform))


def _take_npu() -> None:
    import torch

    if os.environ.get("HYPER_PARALLEL_NPU_SIM") == "1":
        from tests import npu_sim

        npu_sim.install(collective_limit_s=os.environ["RANK_POOL_COLLECTIVE_LIMIT_S"])
    torch.npu.set_device(int(os.environ["RANK"]))


def _join_torch(backend: str) -> tuple[int, int]:
    import torch.distributed as dist

    limit_s = int(os.environ["RANK_POOL_COLLECTIVE_LIMIT_S"])
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit_s))
    return dist.get_rank(), dist.get_world_size()


def _join_mindspore() -> tuple[int, int]:
    import mindspore as ms
    from mindspore import communication

    ms.set_device("CPU")
    communication.init("mccl")
    ms.runtime.launch_blocking()  # Faster for small work, and an error is raised by the operator that met it.
    return int(os.environ["RANK_ID"]), int(os.environ["RANK_SIZE"])


def _function(name: str):
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _described(error: BaseException) -> RankError:
    own_frame = error.__traceback__
    lines = traceback.format_exception(type(error), error, own_frame and own_frame.tb_next)
    return RankError(type(error).__name__, str(error), "".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
