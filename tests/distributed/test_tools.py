"""The table of docs/training.md of what works around a sharded layer on torch: what works is held against one device,
what does not is shown to say so."""

from tests.distributed.test_refusals import assert_words
from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.tools_cases")
MIXED = ("RuntimeError", "got mixed torch.Tensor and DTensor")


def assert_table(results, right, words, limit=1e-12):
    for found in results:
        assert found.keys() == {*right, *words}
        assert all(found[name] < limit for name in right), found
        assert_words({name: found[name] for name in words}, words)


def test_state_dicts(torch_pool):
    whole = ("RuntimeError", "is laid out over a mesh, but the state dict holds a plain tensor", "full_state_dict=True")
    words = {f"whole tensors, assign {assign}": whole for assign in (False, True)}
    words["whole weight on the module"] = ("RuntimeError", "experts: w1 is no longer laid out over the mesh")
    assert_table(torch_pool.run(cases.loading), ["set_model_state_dict", "shards, assign True"], words)


def test_parametrizations(torch_pool):
    words = {
        "low rank, plain": ("RuntimeError", "the parametrization of w1 failed", "distribute_tensor"),
        "before the style": ("ValueError", "w1 missing in ParametrizedGroupedExperts"),
    }
    assert_table(torch_pool.run(cases.low_rank), ["low rank"], words)


def test_optimizers(torch_pool):
    results = torch_pool.run(cases.optimizers)
    # Muon rounds to bfloat16 inside.
    assert all(found.pop("Muon beside AdamW") < 2e-2 for found in results)
    words = {
        "foreach, zero_grad(set_to_none=False)": MIXED,
        "Muon for experts": ("ValueError", "Muon only supports 2D parameters"),
        "Adafactor": ("RuntimeError", "aten.pow_.Scalar"),
    }
    assert_table(results, ["AdamW", "SGD", "Adagrad", "NAdam", "zero_grad(set_to_none=False)"], words)


def test_averages_and_loss_scales(torch_pool):
    assert_table(torch_pool.run(cases.averages_and_scales), ["EMA"], {"EMA, multi": MIXED, "GradScaler": MIXED})


def test_fsdp(torch_pool):
    assert_table(torch_pool.run(cases.fsdp), ["accumulation", "CPU offload"], {})


def test_data_parallel(torch_pool):
    assert_table(torch_pool.run(cases.replicated), ["replicate"], {"DistributedDataParallel": MIXED})


def test_scores_under_fsdps_mixed_precision(torch_pool):
    """They stay fp32 with and without FSDP2's cast of the experts' inputs, to the same gradient of the router."""
    low, full = "torch.bfloat16", "torch.float32"
    plain, cast, rounded = (
        torch_pool.run(cases.scores_under_fsdp, **how)
        for how in ({"cast": False}, {"cast": True}, {"cast": True, "known": False})
    )
    for (seen, expected), (of_cast, gradient), (of_rounded, other) in zip(plain, cast, rounded):
        assert seen == of_cast == [low, low, full] and of_rounded == [low] * 3
        assert (gradient == expected).all() and (other != expected).any() and abs(expected).max() > 0.1
