"""Fixtures of the simulated Ascend tests, and words in pytest's output that say what they are.

`make test-npu-sim` sets HYPER_PARALLEL_NPU_SIM=1; without it nothing here is collected, for torch_npu cannot even be
imported then.
"""

import os

import pytest

from tests.harness.pool import RankPool

ENABLED = os.environ.get("HYPER_PARALLEL_NPU_SIM") == "1"
collect_ignore_glob = [] if ENABLED else ["test_*.py"]
NOTICE = "npu-sim: real torch_npu, simulated devices; no result is from Ascend hardware"
MEASURED = pytest.StashKey()


def pytest_configure(config):
    config.stash[MEASURED] = {}


def pytest_report_header(config):
    return NOTICE if ENABLED else None


def pytest_terminal_summary(terminalreporter, config):
    if ENABLED:
        terminalreporter.write_line(NOTICE)
    for (test, dtype), error in config.stash[MEASURED].items():
        terminalreporter.write_line(f"npu-sim: {test}, {dtype}: largest relative error {error:.1e}")


@pytest.fixture
def measured(request):
    """Call it with a dict of relative errors: the largest of a test and dtype is printed after the tests."""

    def note(errors, dtype):
        largest = request.config.stash[MEASURED]
        case = request.node.originalname, str(dtype).removeprefix("torch.")
        largest[case] = max(largest.get(case, 0.0), *errors.values())

    return note


@pytest.fixture(scope="session")
def npu():
    """The first simulated device, in pytest's own process."""
    import torch

    from tests import npu_sim

    npu_sim.install()
    torch.npu.set_device(0)
    return torch.device("npu", 0)


@pytest.fixture(scope="session")
def npu_pool():
    """Four ranks over HCCL, each with a simulated device."""
    with RankPool("torch_npu", 4) as pool:
        yield pool
