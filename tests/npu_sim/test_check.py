"""npu-sim: ``python -m hyper_parallel.check`` on the simulated devices."""

from tests.distributed.check_cases import run_check

MESH = ("--ep", "2", "--tp", "2")


def test_good_ranks(npu_pool):
    codes, outputs, errors = zip(*npu_pool.run(run_check, arguments=MESH))
    assert codes == (0,) * 4, (outputs[0], errors)
    assert outputs[0].endswith("all right\n")


def test_a_rank_that_gets_zeros(npu_pool):
    codes, outputs, _ = zip(*npu_pool.run(run_check, arguments=MESH, breaks=("all_to_all_rows",), on_ranks=(1,)))
    assert codes == (1,) * 4 and "WRONG on rank 1" in outputs[0]
