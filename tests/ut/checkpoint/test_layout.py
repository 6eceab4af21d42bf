"""Which slices lie on which rank: by hand, and as properties."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.checkpoint.layout import Cut, cover, local_pieces, overlap


def test_by_hand():
    # w2 [E=4, D=3, H=8] as [Shard(0), Shard(2)] on (2, 2), at ep 1 and tp 0.
    shape, (piece,) = local_pieces((4, 3, 8), (Cut(0), Cut(2)), (2, 2), (1, 0))
    assert shape == (2, 3, 4)
    assert (piece.offsets, piece.shape) == ((2, 0, 0), (2, 3, 4))


def test_fsdp_over_ep_by_hand():
    # dim 0 of 8 experts: ep 0 holds 0..3, and dp 1 of it 2, 3.
    shape, (piece,) = local_pieces((8, 2), (Cut(0, groups=2), Cut(0)), (2, 2), (1, 0))
    assert shape == (2, 2) and piece.offsets == (2, 0)


def test_gate_and_up_cut_alike_are_two_pieces():
    # [E=2, 2H=8, D=3] over tp 2: rank 1 holds rows 2, 3 of the gate and of the up half.
    shape, pieces = local_pieces((2, 8, 3), (Cut(1, groups=2),), (2,), (1,))
    assert shape == (2, 4, 3)
    assert [piece.offsets for piece in pieces] == [(0, 2, 0), (0, 6, 0)]
    assert [piece.local[1] for piece in pieces] == [slice(0, 2), slice(2, 4)]


def test_a_scalar_and_an_empty_tensor():
    assert local_pieces((), (None,), (4,), (3,))[1][0].offsets == ()
    assert local_pieces((0, 3), (), (), ()) == ((0, 3), [])


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_ranks_together_hold_everything_once(shape, mesh, data):
    """Every layout: what the pieces put together is the whole tensor, and replicated axes hold the same."""
    cuts = [data.draw(st.none() | st.integers(0, len(shape) - 1).map(Cut)) for _ in mesh]
    whole = np.arange(np.prod(shape)).reshape(shape)
    seen, boxes = np.zeros(shape, int), set()
    for coordinate in itertools.product(*map(range, mesh)):
        local_shape, pieces = local_pieces(shape, cuts, mesh, coordinate)
        local = whole
        for cut, size, place in zip(cuts, mesh, coordinate):
            if cut is not None:
                rows = -(-local.shape[cut.dim] // size)
                local = local[(slice(None),) * cut.dim + (slice(place * rows, (place + 1) * rows),)]
        assert local.shape == local_shape
        for piece in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape))
            assert np.array_equal(whole[box], local[piece.local])
            if (piece.offsets, piece.shape) not in boxes:
                seen[box] += 1
            boxes.add((piece.offsets, piece.shape))
    assert (seen == 1).all() and cover(shape, list(boxes))


def test_cover_finds_holes_and_overlaps():
    assert cover((4,), [((0,), (2,)), ((2,), (2,))])
    assert not cover((4,), [((0,), (2,))])
    assert not cover((4,), [((0,), (2,)), ((1,), (2,))])


def test_overlap():
    assert overlap((0, 2), (4, 4), (2, 0), (4, 3)) == ((2, 2), (2, 1))
    assert overlap((0,), (2,), (2,), (2,)) is None
    assert overlap((), (), (), ()) == ((), ())
