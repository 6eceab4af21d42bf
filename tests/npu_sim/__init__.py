"""The real torch_npu on a machine without Ascend devices; see README.md."""

import os

__all__ = ["install"]


def install(collective_limit_s="30"):
    """Let npu tensors compute on the CPU in this process; called before the first of them is made.

    Args:
        collective_limit_s: how long src/hccl.c lets a rank wait for the others.
    """
    from tests.npu_sim import aten, costs, operators

    os.environ["NPU_SIM_LIMIT_S"] = str(collective_limit_s)
    costs.use(costs.ATLAS_A2)
    aten.install()
    operators.install()
