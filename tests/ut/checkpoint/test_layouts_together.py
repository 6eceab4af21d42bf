"""Save under one layout, load under any other: ranks are threads, tensors numpy arrays, and no framework is there."""

import threading
from unittest import mock

import numpy as np
import pytest

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint import loading, saving
from hyper_parallel.checkpoint.layout import Cut, local_pieces
from hyper_parallel.checkpoint.values import Value

SHAPES = {"w1": (8, 6, 4), "w2": (8, 4, 6), "packed": (4, 8, 3), "dense": (5, 3), "scalar": (), "none": (0, 2)}
LAYOUTS = {
    "ep 2, tp 2": ((2, 2), {"w1": (Cut(0), Cut(1)), "w2": (Cut(0), Cut(2)), "packed": (Cut(0), Cut(1, groups=2))}),
    "ep 4": ((4, 1), {"w1": (Cut(0), Cut(1)), "w2": (Cut(0), Cut(2)), "packed": (Cut(0), None)}),
    "tp 3": ((1, 3), {"w1": (Cut(0), Cut(1)), "w2": (Cut(0), Cut(2)), "dense": (None, Cut(0))}),
    "dp 2 as FSDP, ep 2": ((2, 2), {name: (Cut(0, groups=2), Cut(0)) for name in ("w1", "w2", "packed")}),
    "one": ((1, 1), {}),
}


class Room:
    """A rank's room; the ranks meet at a barrier."""

    NAME = "numpy"

    def __init__(self, rank, meeting, told):
        self._rank, self._meeting, self._told = rank, meeting, told

    def rank_and_size(self):
        return self._rank, len(self._told)

    def all_gather(self, data, name):
        self._told[self._rank] = data
        self._meeting.wait(timeout=30)
        gathered = list(self._told)
        self._meeting.wait(timeout=30)
        return gathered

    def model_values(self, module):
        return module


def module_of(layout, rank, filled):
    mesh, cuts = LAYOUTS[layout]
    values = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        whole = np.random.default_rng(seed).standard_normal(shape)
        local_shape, pieces = local_pieces(shape, cuts.get(name, (None, None)), mesh, np.unravel_index(rank, mesh))
        local = np.zeros(local_shape)
        for piece in pieces:
            box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.shape))
            local[piece.local] = whole[box] if filled else 0
        write = local.__setitem__
        values[name] = Value("F64", shape, local_shape, tuple(pieces), local.view, lambda a, w=write: w(..., a))
    return values


def on_ranks(layout, function):
    """``function(room, rank)`` on a thread per rank; their results or errors."""
    num_ranks = int(np.prod(LAYOUTS[layout][0]))
    meeting, told, results = threading.Barrier(num_ranks), [b""] * num_ranks, [None] * num_ranks
    rooms = threading.local()

    def run(rank):
        rooms.mine = Room(rank, meeting, told)
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    with mock.patch.object(saving, "room_of", lambda module: rooms.mine), mock.patch.object(
        loading, "room_of", lambda module: rooms.mine
    ), mock.patch.object(saving, "_unfinished", mock.MagicMock(__contains__=lambda *_: False)):  # fmt: skip
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    return results


@pytest.mark.parametrize("here", LAYOUTS)
@pytest.mark.parametrize("there", LAYOUTS)
def test_any_layout_to_any_other(tmp_path, there, here):
    saved = on_ranks(there, lambda rank: checkpoint.save(tmp_path / "a", module_of(there, rank, True), step=5))
    assert saved == [None] * len(saved)

    def loaded(rank):
        module = module_of(here, rank, False)
        assert checkpoint.load(tmp_path / "a", module) == 5
        return module

    for rank, module in enumerate(on_ranks(here, loaded)):
        assert not isinstance(module, Exception), module
        expected = module_of(here, rank, True)
        for name, value in module.items():
            assert np.array_equal(value.read(), expected[name].read()), name
        assert np.abs(module["w1"].read()).max() > 0


def test_what_nobody_holds_is_named(tmp_path):
    def incomplete(rank):
        module = module_of("ep 4", rank, True)
        if rank == 1:
            del module["w2"]
        checkpoint.save(tmp_path / "a", module)

    found = on_ranks("ep 4", incomplete)
    assert {type(error) for error in found} == {checkpoint.CheckpointError}
    assert len({str(error) for error in found}) == 1 and "do not hold all of w2" in str(found[0])
    assert not list(tmp_path.iterdir())


def test_the_ranks_share_the_writing(tmp_path):
    on_ranks("ep 2, tp 2", lambda rank: checkpoint.save(tmp_path / "a", module_of("ep 2, tp 2", rank, True)))
    sizes = [file.stat().st_size for file in (tmp_path / "a" / "model").glob("*.safetensors")]
    assert len(sizes) == 8  # two pieces of the packed weight per rank, which one file cannot hold
    manifest = loading.read_manifest(tmp_path / "a")
    pieces = [piece for entry in manifest["model"].values() for piece in entry["pieces"]]
    assert len({(piece["file"], piece["start"]) for piece in pieces if 0 not in piece["shape"]}) == len(
        [piece for piece in pieces if 0 not in piece["shape"]]
    )
