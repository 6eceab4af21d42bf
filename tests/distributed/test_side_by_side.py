"""Two implementations on the same numbers: torch beside MindSpore, and ours beside TorchTitan's."""

import importlib.util

import pytest

from tests.distributed import expert_cases
from tests.harness import oracle
from tests.harness.by_name import CasesOf

peers = CasesOf("tests.distributed.peer_cases")
llama4 = CasesOf("tests.distributed.llama4_cases")
needs_torchtitan = pytest.mark.skipif(
    not importlib.util.find_spec("torchtitan"), reason="needs: pip install --no-deps torchtitan==0.2.2"
)


@pytest.mark.parametrize("ep,tp", [(2, 2), (4, 1)])
def test_torch_and_mindspore(torch_pool, mindspore_pool, ep, tp):
    problem = oracle.make_problem(ep, 8, 6, 8)
    arguments = {"style": "ExpertTensorParallel", "ep": ep, "tp": tp, "problem": problem}
    pairs = zip(
        torch_pool.run(expert_cases.evaluations, **arguments), mindspore_pool.run(expert_cases.evaluations, **arguments)
    )
    for (where, first), (also_where, second) in pairs:
        assert where == also_where
        compared = [(first.output, second.output), *zip(first.input_gradients, second.input_gradients)]
        compared += [(first.parameter_gradients[name], second.parameter_gradients[name]) for name in ("w1", "w2", "w3")]
        assert max(oracle.relative_error(b, a) for a, b in compared) < 1e-5


@needs_torchtitan
@pytest.mark.parametrize("ep,tp", [(2, 2), (4, 1), (1, 4)])
def test_torchtitan(torch_pool, ep, tp):
    problem = oracle.make_problem(ep, 8, 6, 8)
    arguments = {"ep": ep, "tp": tp, "problem": problem}
    for differences in torch_pool.run(peers.against_torchtitan, **arguments):
        assert max(differences) < 1e-5, differences
    if tp > 1:  # its output alone is one term of the sum
        for differences in torch_pool.run(peers.against_torchtitan, whole_output=False, **arguments):
            assert differences[0] > 0.1


@needs_torchtitan
def test_torchtitans_plan_for_llama4(torch_pool):
    """Tensor and sequence parallel around, our style inside, with the edits that docs/torchtitan.md lists."""
    for errors in torch_pool.run(llama4.against_one_device, time_limit_s=180):
        assert len(errors) == 27 and max(errors.values()) < 1e-5, errors
    for errors in torch_pool.run(llama4.against_one_device, with_style_alone=True, time_limit_s=180):
        assert errors["logits"] > 1e-2 and errors["layers.1.moe.router.gate.weight"] > 1e-2, errors
