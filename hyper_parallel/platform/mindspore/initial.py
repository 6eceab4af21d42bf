"""Values of a shard whose whole tensor was never made: of parameters under ``no_init_parameters``."""

import zlib

import mindspore as ms
import numpy as np
from mindspore.common import initializer as init

__all__ = ["drawn_by_element", "shard_of"]

# Each element is drawn alone, by numbers given in words, so that a part may be drawn for the whole.
BY_ELEMENT = (init.Constant, init.Normal, init.One, init.TruncatedNormal, init.Uniform, init.Zero)


def drawn_by_element(parameter):
    """Whether the values of one part of the parameter, still to be drawn, do not depend on those of others or the shape
    of the whole."""
    return type(parameter.init_mode.init) in BY_ELEMENT


def shard_of(parameter, device_mesh, placements):
    """This rank's part, drawn here: ranks that hold the same part draw the same numbers where all called
    ``mindspore.set_seed`` with the same number, others draw others."""
    shape, part = list(parameter.shape), []
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            shape[placement.dim] //= device_mesh.size(axis)
            part.append((axis, device_mesh.get_local_rank(axis)))
    before = np.random.get_state()  # from which MindSpore's initializers take their seeds
    np.random.seed(zlib.crc32(repr((ms.get_seed(), parameter.name, part)).encode()))
    try:
        return init.initializer(parameter.init_mode.init, shape, parameter.dtype).init_data()
    finally:
        np.random.set_state(before)
