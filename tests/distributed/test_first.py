"""The example of tests/README.md: experts cut over 2 x 2 ranks compute what one device computes."""

import hyper_parallel as hp
from tests.harness import oracle
from tests.harness.setting import coordinates, make_experts, mesh_for


def output_error(context, problem):
    adapter, style = context.framework, hp.ExpertTensorParallel()
    experts = style.apply(make_experts(context, problem), mesh_for(context, style, ep=2, tp=2))
    ep_rank, _ = coordinates(context, ep=2, tp=2)
    y = experts(*(adapter.tensor(values[ep_rank]) for values in (problem.x, problem.counts, problem.scores)))
    return oracle.relative_error(adapter.array(y), oracle.one_device(problem).outputs[ep_rank])


def test_output(pool):
    problem = oracle.make_problem(ep=2, num_experts=4, dim=6, hidden=8)
    assert max(pool.run(output_error, problem=problem)) < 1e-5
