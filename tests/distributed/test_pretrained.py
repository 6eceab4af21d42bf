"""Models of transformers go from their folders onto any layout and back, and no rank holds more than its own."""

import pytest

from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.pretrained_cases")
LIMIT = 1e-5


@pytest.mark.parametrize(
    "family,style,ep,tp,per_expert",
    [
        ("Mixtral", "ExpertTensorParallel", 2, 2, True),
        ("Mixtral", "SplitExpertTensorParallel", 2, 2, False),
        ("Qwen3Moe", "ExpertTensorParallel", 2, 2, True),
        ("Qwen3Moe", "ExpertParallel", 4, 1, True),
        ("Olmoe", "ExpertTensorParallel", 2, 2, True),
        ("DeepseekV3", "ExpertTensorParallel", 2, 2, True),
        ("DeepseekV3", "TensorParallel", 1, 4, False),
        ("GptOss", "DedupExpertTensorParallel", 2, 2, True),
    ],
)
def test_a_folder_goes_onto_ranks_and_back(hf_pool, tmp_path, family, style, ep, tp, per_expert):
    arguments = {"family": family, "style": style, "ep": ep, "tp": tp, "per_expert": per_expert}
    for wrong, error, theirs, ours in hf_pool.run(
        cases.round_trip, folder=str(tmp_path), time_limit_s=100, **arguments
    ):
        assert wrong == []
        assert error < LIMIT
        assert ours == theirs
        one_by_one = [name for name in ours if ".experts.3." in name]
        assert bool(one_by_one) == (per_expert and family != "GptOss")
        assert any(".block_sparse_moe.experts.3.w1." in name for name in ours) == (family == "Mixtral" and per_expert)


def test_gate_taken_for_up_is_seen(hf_pool, tmp_path):
    for wrong, error in hf_pool.run(cases.gate_for_up, folder=str(tmp_path)):
        assert [name for name in wrong if name.endswith("gate_up_proj")] == wrong and len(wrong) == 2
        assert error > 0.1


def test_under_fsdp2_on_three_meshes(hf_pool, tmp_path):
    for wrong, errors, placements in hf_pool.run(cases.fsdp, folder=str(tmp_path), time_limit_s=100):
        assert wrong == []
        assert max(errors) < LIMIT
        assert placements.count("Shard(") == 3, placements  # experts: over dp by FSDP2, over ep and tp by the style


def test_dense_weights_in_any_placements(hf_pool, tmp_path):
    for wrong, misshaped in hf_pool.run(cases.any_placements, folder=str(tmp_path)):
        assert wrong == []
        assert "model.layers.0.mlp.gate.weight: (8, 16) in the folder, (5, 16) in the model" in misshaped


def test_no_rank_holds_more_than_two_slices_beside_its_own(hf_pool, tmp_path):
    for found in hf_pool.run(cases.peaks, folder=str(tmp_path), time_limit_s=100):
        reading, writing, by_whole_tensors, largest = found
        assert reading < 2 * largest < by_whole_tensors, found
        assert writing < 2 * largest, found


def test_what_fails_on_one_rank_is_told_on_all_and_leaves_the_folder(hf_pool, tmp_path):
    for told, wrong, left in hf_pool.run(cases.one_rank_fails, folder=str(tmp_path)):
        assert [("on rank 2: OSError: no such disk" in text) for text in told] == [True, True]
        assert wrong == [] and left == ["theirs"]
