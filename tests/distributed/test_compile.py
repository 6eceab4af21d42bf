"""torch.compile of blocks with a MoE layer: what one graph serves, and checkpointing around and within.

The blocks are compiled with ``fullgraph=True``: a block that the compiler gives up is an error.
"""

import pytest

from tests.harness.by_name import CasesOf

cases = CasesOf("tests.distributed.compile_cases")
STYLES = (
    "ExpertTensorParallel",
    "DedupExpertTensorParallel",
    "SplitExpertTensorParallel",
    "ExpertParallel",
    "TensorParallel",
)
TOKEN_COUNTS = (8, 8, 8, 3, 5, 7, 9, 16, 1, 12, 20, 11, 30, 2)  # 12 different ones; three routings of the first
# One for the first number of tokens, one for any number, one for one token: graphs of each kind of block.
KINDS_OF_BLOCK, KINDS_OF_COUNT = 2, 3


def run(pool, **arguments):
    return pool.run(cases.compiled, time_limit_s=120, **arguments)


@pytest.mark.parametrize(
    "style,backend", [*((style, "aot_eager") for style in STYLES), ("ExpertTensorParallel", "eager")]
)
def test_one_graph_serves_all_routings(torch_pool, style, backend):
    """Nor do two layers need one each. One style stands for all with the other backend, which sees finished graphs."""
    setting = {"style": style, "backend": backend, "wrapping": "compile", "num_kinds": 1}
    for error, graphs, same_loads, _ in run(torch_pool, token_counts=TOKEN_COUNTS, **setting):
        assert error < 1e-12 and same_loads
        assert graphs[:3] == [1] * 3
        assert graphs[-1] <= KINDS_OF_COUNT


@pytest.mark.parametrize(
    "wrapping,style", [*(("compile(checkpoint)", s) for s in STYLES), ("checkpoint(compile)", "ExpertTensorParallel")]
)
def test_checkpointed_blocks(torch_pool, wrapping, style):
    kinds = KINDS_OF_BLOCK if style == "ExpertTensorParallel" else 1
    setting = {"style": style, "backend": "aot_eager", "wrapping": wrapping, "num_kinds": kinds}
    for error, graphs, same_loads, calls in run(torch_pool, token_counts=(8, 8, 5), **setting):
        assert error < 1e-12 and same_loads
        assert graphs[:2] == [kinds] * 2
        assert calls == 4  # two blocks, each in forward and once more in backward


@pytest.mark.parametrize("score_position", ["before", "after"])
def test_score_positions(torch_pool, score_position):
    arguments = {"score_position": score_position}
    setting = {"style": "ExpertTensorParallel", "backend": "eager", "wrapping": "compile(checkpoint)", "num_kinds": 1}
    for error, graphs, *_ in run(torch_pool, token_counts=(8, 6), arguments=arguments, **setting):
        assert error < 1e-12 and graphs[0] == 1


def test_a_hook_on_the_experts_breaks_the_graph(torch_pool):
    setting = {"style": "ExpertTensorParallel", "backend": "eager", "wrapping": "compile", "fullgraph": False}
    for error, graphs, same_loads, _ in run(torch_pool, token_counts=(8, 8, 8, 8), hook=True, **setting):
        assert error < 1e-12 and same_loads
        assert graphs[1] == graphs[-1] > KINDS_OF_BLOCK  # pieces may be met first in the second step; routings add none
