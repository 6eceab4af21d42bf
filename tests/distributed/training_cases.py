"""What the cases of training steps share: tokens, parts of whole arrays, and a wrong rule that must be seen."""

from contextlib import contextmanager
from unittest import mock

import numpy as np

from hyper_parallel.training import gradients
from tests.harness import oracle

DIM, HIDDEN_DIM, NUM_EXPERTS, TOP_K = 8, 16, 4, 2
MAX_NORM = 0.05  # below the norm of every problem here, so that clipping does something
NORM_TYPES = (float("inf"), 3.0, 2.0)
RULES = ("has placements", "axes")


def batches(num, seed=0):
    """Tokens [T, DIM] of each of ``num`` ranks that see different ones; every rank has as many."""
    return list(np.random.default_rng(seed).standard_normal((num, 12, DIM)).astype(np.float32))


def place(mesh):
    """Which batch this rank sees: row by row over (dp, ep)."""
    return mesh.get_local_rank("dp") * mesh["ep"].size() + mesh.get_local_rank("ep")


def own_part(whole, parameter):
    """The part of a whole array that belongs on this rank, by the parameter's placements."""
    for axis, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard():
            pieces = np.split(whole, parameter.device_mesh.size(axis), axis=placement.dim)
            whole = pieces[parameter.device_mesh.get_local_rank(axis)]
    return whole


def largest_error(found, wanted, parameters):
    """The largest relative error over the parameters."""
    pairs = zip(found, wanted, parameters, strict=True)
    return max(oracle.relative_error(part, own_part(whole, parameter)) for part, whole, parameter in pairs)


@contextmanager
def rule(kind):
    """ "axes" is ours; "has placements" leaves alone whatever is sharded over anything, as one would write by hand."""

    def wrong(self, parameter):
        return () if hasattr(parameter, "placements") else self.axes

    if kind == "axes":
        yield
        return
    with mock.patch.object(gradients.Span, "shared_axes", wrong):
        yield
