"""The mesh over MindSpore's communication groups."""

import zlib

import mindspore as ms
import mindspore.communication as comm
import numpy as np

from hyper_parallel.core import device_mesh
from hyper_parallel.platform.mindspore import compat

__all__ = ["DeviceMesh", "init_device_mesh", "check_device_type", "DEVICE_TARGETS", "BACKENDS"]

DEVICE_TARGETS = {"cpu": "CPU", "npu": "Ascend"}
BACKENDS = {"cpu": "mccl", "npu": "hccl"}


class DeviceMesh(device_mesh.DeviceMesh):
    """A mesh whose groups are names of MindSpore communication groups, the same at every start."""

    def _make_group(self, ranks):
        # Ranks of an axis of all ranks are evenly spaced, so three numbers name them; others need all of them.
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        name = f"hyper_parallel_from_{ranks[0]}_step_{step}_count_{len(ranks)}"
        if ranks != list(range(ranks[0], ranks[-1] + 1, step)):
            name += f"_{zlib.crc32(repr(ranks).encode()):08x}"
        # Members only, ascending, and a second time does nothing: what MindSpore asks for.
        comm.create_group(name, ranks)
        return name


def init_device_mesh(device_type, shape, names):
    """The mesh of all ranks; see ``hyper_parallel.init_device_mesh``."""
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise RuntimeError("MindSpore must run in PyNative mode: mindspore.set_context(mode=mindspore.PYNATIVE_MODE)")
    ranks = np.arange(np.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, ranks, names, comm.get_rank())


def check_device_type(device_type):
    """Raise ``ValueError`` unless MindSpore runs on this type, ``RuntimeError`` unless its ranks are connected."""
    target = ms.get_context("device_target")
    if DEVICE_TARGETS.get(device_type) != target:
        raise ValueError(
            f"device_type {device_type!r} does not fit the device target {target!r}: on MindSpore call "
            + " or ".join(f'mindspore.set_device("{of}") for "{kind}"' for kind, of in DEVICE_TARGETS.items())
        )
    if not compat.communication_is_initialised():
        raise RuntimeError(
            f'communication is not initialised; call mindspore.communication.init("{BACKENDS[device_type]}") first, in '
            "ranks started by msrun or with MindSpore's worker environment variables"
        )
