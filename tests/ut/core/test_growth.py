"""Rank arithmetic for 4,096 ranks on one machine: what each rank would see, against plain arithmetic."""

import numpy as np
import pytest

from hyper_parallel.core.expert_parallel.exchange.rows import expert_major_order, inverse_order, splits_by_rank
from tests.harness.mesh_of_tuples import MeshOfTuples

NUM_RANKS = 4096
SHAPES = {("ep", "tp"): (64, 64), ("dp", "ep", "tp"): (16, 16, 16)}
SOME_RANKS = (0, 1, 63, 64, 1000, 2047, 2048, 3333, 4032, 4095)


def mesh_of(names, rank, offset=0):
    return MeshOfTuples("cpu", np.arange(NUM_RANKS).reshape(SHAPES[names]) + offset, names, rank)


def coordinates_of(shape, rank):
    """Row by row: the last axis counts fastest."""
    found = []
    for size in reversed(shape):
        rank, coordinate = divmod(rank, size)
        found.insert(0, coordinate)
    return found


def ranks_along(shape, rank, axis):
    step = int(np.prod(shape[axis + 1 :]))
    first = rank - coordinates_of(shape, rank)[axis] * step
    return list(range(first, first + shape[axis] * step, step))


@pytest.mark.parametrize("names", SHAPES)
@pytest.mark.parametrize("rank", SOME_RANKS)
def test_coordinates_and_groups(names, rank):
    shape, mesh = SHAPES[names], mesh_of(names, rank)
    assert mesh.get_coordinate() == coordinates_of(shape, rank)
    assert mesh.size() == NUM_RANKS and mesh.shape == shape
    for axis, name in enumerate(names):
        assert mesh.axis_ranks(axis) == ranks_along(shape, rank, axis)
        assert mesh.get_group(name) == tuple(ranks_along(shape, rank, axis))
        assert mesh.get_local_rank(name) == coordinates_of(shape, rank)[axis]


@pytest.mark.parametrize("rank", SOME_RANKS)
def test_slices(rank):
    names = ("dp", "ep", "tp")
    shape, mesh = SHAPES[names], mesh_of(names, rank)
    dp, ep, tp = coordinates_of(shape, rank)
    inner = mesh["ep", "tp"]
    assert inner.shape == (16, 16) and inner.get_coordinate() == [ep, tp]
    assert inner.mesh.ravel().tolist() == list(range(256 * dp, 256 * dp + 256))
    assert inner["tp"].get_group() == tuple(ranks_along(shape, rank, 2))
    assert mesh["ep"].mesh.tolist() == ranks_along(shape, rank, 1) and mesh["ep"].get_local_rank() == ep
    assert mesh["dp", "tp"].mesh.shape == (16, 16) and mesh["dp", "tp"].get_coordinate() == [dp, tp]


@pytest.mark.parametrize("names", SHAPES)
def test_groups_of_an_axis_are_seen_alike_by_all_ranks(names):
    """Each of the 4,096 ranks builds its own view; the members of a group must agree on it."""
    members = {}
    for rank in range(NUM_RANKS):
        mesh = mesh_of(names, rank)
        for name in names:
            group = mesh.get_group(name)
            assert group[mesh.get_local_rank(name)] == rank
            members.setdefault((name, group), []).append(rank)
    assert all(list(group) == ranks for (_, group), ranks in members.items())
    assert len(members) == sum(NUM_RANKS // size for size in SHAPES[names])


def test_a_rank_outside_of_the_mesh():
    mesh = mesh_of(("ep", "tp"), 0, offset=NUM_RANKS)
    assert mesh.get_coordinate() is None


@pytest.mark.parametrize("num_ranks,num_local", [(64, 8), (4096, 1), (4096, 2)])
def test_index_arithmetic(num_ranks, num_local):
    """Splits and order among many ranks, against a stable sort of every row's expert."""
    draw = np.random.default_rng(0)
    counts_PL = draw.integers(0, 4, (num_ranks, num_local))
    experts_R = np.repeat(np.tile(np.arange(num_local), num_ranks), counts_PL.ravel())
    order_R = expert_major_order(counts_PL)
    assert np.array_equal(order_R, np.argsort(experts_R, kind="stable"))
    assert np.array_equal(order_R[inverse_order(order_R)], np.arange(len(order_R)))
    assert splits_by_rank(counts_PL.ravel(), num_ranks) == tuple(counts_PL.sum(1).tolist())
