"""Which of torch_npu's operators run, and what is said of it. torch_npu is imported when a tensor comes that needs it.

Where an operator does not take the dtype or the shape, the portable code computes.
"""

import functools
import logging

import torch

__all__ = ["runs"]

logger = logging.getLogger("hyper_parallel")

# Some releases document float32 too; it is left to torch's own operators, which are the same on every device.
DTYPES = (torch.float16, torch.bfloat16)


@functools.cache
def runs(operator, dtype, obstacle=None):
    """Whether torch_npu's ``operator`` runs, and not the portable code.

    ``obstacle`` is what forbids it beside the dtype, in words.
    """
    if dtype not in DTYPES:
        obstacle = "it is used for torch.float16 and torch.bfloat16"
    if obstacle:
        logger.info("npu, %s: torch's own operators in place of %s: %s", dtype, operator, obstacle)
    else:
        logger.info("npu, %s: %s", dtype, operator)
    return not obstacle
