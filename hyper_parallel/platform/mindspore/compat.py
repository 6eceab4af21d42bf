"""What the library uses of MindSpore that MindSpore does not document. A new release is this one file to look at.

Tried with MindSpore 2.10.
"""

import mindspore.communication as comm
from mindspore import nn
from mindspore.common._grad_function import _Function
from mindspore.ops.auto_generate import grouped_matmul_v4
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

__all__ = [
    "Function",
    "communication_is_initialised",
    "dist_comm_irecv_op",
    "dist_comm_isend_op",
    "grouped_matmul_v4",
    "parameters_of",
]

# An operator with a gradient of its own, as torch.autograd.Function is one.
Function = _Function


def communication_is_initialised() -> bool:
    """Whether ``mindspore.communication.init`` has been called."""
    return comm.GlobalComm.INITED


def parameters_of(cell: nn.Cell) -> dict:
    """The dict in which a cell keeps its own parameters."""
    return cell._params
