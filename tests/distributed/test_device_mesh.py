"""One contract for meshes, placements and layouts, checked on every platform."""

import numpy as np

import hyper_parallel as hp
from tests.distributed import mesh_cases as cases


def test_contract(pool):
    for rank, found in enumerate(pool.run(cases.contract)):
        ep, tp = divmod(rank, 2)
        assert found["class"]
        assert found["whole"] == {
            "ndim": 3,
            "shape": (1, 2, 2),
            "names": ("dp", "ep", "tp"),
            "size": 4,
            "sizes": [1, 2, 2],
            "coordinate": [0, ep, tp],
            "local_ranks": [0, ep, tp],
            "dp": 0,
            "ep": ep,
            "tp": tp,
        }
        for name, coordinate in (("ep", ep), ("tp", tp)):
            assert found[name] == {
                "ndim": 1,
                "shape": (2,),
                "names": (name,),
                "size": 2,
                "sizes": [2],
                "coordinate": [coordinate],
                "local_ranks": [coordinate],
                "only": coordinate,
                name: coordinate,
            }
        assert found["ep, tp"]["shape"] == (2, 2) and found["ep, tp"]["coordinate"] == [ep, tp]
        assert found["ep, tp"]["names"] == ("ep", "tp") and found["ep, tp"]["size"] == 4
        assert found["slice of slice"] == found["tp"]
        assert found["unknown"][0] == "KeyError"
        assert found["no axis"][0] == found["no axis for rank"][0] == "RuntimeError"


def test_groups_are_in_mesh_order(pool):
    for rank, found in enumerate(pool.run(cases.members)):
        ep, tp = divmod(rank, 2)
        assert found == {"ep": [tp, 2 + tp], "tp": [2 * ep, 2 * ep + 1]}


def test_distribute_tensor(pool):
    whole = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    for coordinate, results in pool.run(cases.layouts):
        for pair, placements_kept, mesh_kept, local, gathered in results:
            expected = whole
            for placement, position in zip(pair, coordinate):
                if placement.is_shard():
                    expected = np.split(expected, 2, axis=placement.dim)[position]
            assert placements_kept and mesh_kept
            np.testing.assert_array_equal(local, expected)
            np.testing.assert_array_equal(gathered, whole)


def test_distribute_module(pool):
    for seen, output in pool.run(cases.hooks):
        assert seen == [("", True)]
        np.testing.assert_array_equal(output, [7.0, 21.0])


def test_mindspore_layout(mindspore_pool):
    for there_and_back, w1, w2, partial in mindspore_pool.run(cases.mindspore_layouts):
        for pair, back in there_and_back:
            assert back == pair
        # MindSpore counts mesh axes from the right: 1 is ep, 0 is tp, -1 is none.
        assert w1["device_matrix"] == (2, 2) and w1["tensor_map"] == (1, 0, -1) and w1["alias_name"] == ("ep", "tp")
        assert w2["tensor_map"] == (1, -1, 0)
        assert partial[0] == "ValueError" and "Partial" in partial[1]


def test_torch_placements_are_accepted_and_equal_ours(torch_pool):
    from torch.distributed import tensor as torch_tensor

    for ours, theirs in (
        (hp.Shard(1), torch_tensor.Shard(1)),
        (hp.Replicate(), torch_tensor.Replicate()),
        (hp.Partial(), torch_tensor.Partial()),
    ):
        assert ours == theirs and theirs == ours
    assert hp.Shard(0) != torch_tensor.Shard(1) and torch_tensor.Replicate() != hp.Shard(0)
    for results in torch_pool.run(laid_out_with_torch_placements):
        assert results == (2, 4)


def laid_out_with_torch_placements(context):
    from torch.distributed.tensor import Shard

    from tests.harness.setting import whole_mesh

    mesh = whole_mesh("torch", context.world_size, 2, 2)["ep", "tp"]
    tensor = context.framework.tensor(np.zeros((4, 8)))
    return tuple(hp.distribute_tensor(tensor, mesh, [Shard(0), Shard(1)]).to_local().shape)
