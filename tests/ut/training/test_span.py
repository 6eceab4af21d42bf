"""Which axes hold the same part of a parameter, for every rank of (dp, ep, tp) = (2, 3, 2), in one process."""

from dataclasses import dataclass

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard
from hyper_parallel.training.gradients import buckets
from hyper_parallel.training.span import Span
from tests.harness.mesh_of_tuples import MeshOfTuples

SHAPE, NAMES = (2, 3, 2), ("dp", "ep", "tp")


@dataclass
class Parameter:
    shape: tuple = (6, 4, 2)
    device_mesh: object = None
    placements: tuple = ()


def mesh_of(rank, shape=SHAPE, names=NAMES):
    return MeshOfTuples("cpu", np.arange(12).reshape(shape), names, rank)


def span_of(mesh):
    return Span(None, mesh, mesh.mesh, tuple(mesh.get_coordinate()))


def laid_out(mesh, *placements):
    return Parameter(device_mesh=mesh, placements=placements)


@pytest.mark.parametrize("rank", range(12))
def test_shared_axes(rank):
    mesh = mesh_of(rank)
    spread = span_of(mesh["dp", "ep"])
    flat = mesh_of(rank, (6, 2), ("dp_ep", "tp"))["dp_ep"]
    wanted = {
        "dense": (Parameter(), (0, 1)),
        "experts": (laid_out(mesh["ep", "tp"], Shard(0), Shard(1)), (0,)),
        "shared expert": (laid_out(mesh["tp"], Shard(0)), (0, 1)),
        "experts sharded again over dp": (laid_out(mesh, Shard(0), Shard(0), Shard(1)), ()),
        "dense sharded over all": (laid_out(flat, Shard(0)), ()),
        "laid out but not cut": (laid_out(mesh["ep", "tp"], Replicate(), Replicate()), (0, 1)),
        "cut over dp only": (laid_out(mesh["dp"], Shard(0)), (1,)),
    }
    found = {name: spread.shared_axes(parameter) for name, (parameter, _) in wanted.items()}
    assert found == {name: axes for name, (_, axes) in wanted.items()}


@pytest.mark.parametrize("rank", range(12))
def test_ranks_along_axes(rank):
    spread = span_of(mesh_of(rank)["dp", "ep"])
    assert spread.axes == (0, 1) and spread.size == 6
    tp = rank % 2
    assert spread.along((0, 1)) == tuple(range(tp, 12, 2))
    assert spread.along((0,)) == (rank % 6, rank % 6 + 6)


@pytest.mark.parametrize("rank", range(12))
def test_an_axis_of_both_kinds_is_refused(rank):
    mesh = mesh_of(rank)
    flat = span_of(mesh_of(rank, (6, 2), ("dp_ep", "tp"))["dp_ep"])
    experts = laid_out(mesh["ep", "tp"], Shard(0), Shard(1))
    with pytest.raises(ValueError, match="axis 'dp_ep' of the mesh joins ranks that hold the same part"):
        flat.shared_axes(experts)
    assert flat.shared_axes(laid_out(mesh["tp"], Shard(0))) == (0,)


def test_axes_of_one_rank_need_nothing():
    mesh = mesh_of(3, (1, 12), ("dp", "ep"))
    assert span_of(mesh).axes == (1,)
    assert span_of(mesh).shared_axes(laid_out(mesh["ep"], Shard(0))) == ()


def test_buckets_hold_one_dtype_and_one_set_of_axes_each():
    def tensor(size, dtype="float32"):
        return np.zeros(size, dtype)

    entries = [
        ("a", 0, tensor(2)),
        ("b", 1, tensor(1)),
        ("a", 2, tensor(1, "float16")),
        ("a", 3, tensor(2)),
        ("a", 4, tensor(9)),
        ("a", 5, tensor(1)),
    ]
    found = list(buckets(entries, limit=16))
    assert sorted(found) == [("a", [0, 3]), ("a", [2]), ("a", [4]), ("a", [5]), ("b", [1])]
