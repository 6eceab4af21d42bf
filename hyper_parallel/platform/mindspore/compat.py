"""What the library uses of MindSpore that MindSpore does not document. A new release is this one file to look at.

Tried with MindSpore 2.10.
"""

import functools
import gc
from collections.abc import Callable

import mindspore as ms
import mindspore.communication as comm
from mindspore import nn
from mindspore._c_expression import pi_jit_set_context
from mindspore._c_expression.amp import AmpLevel, get_curr_amp_strategy, pop_amp_strategy, push_amp_strategy
from mindspore.common._grad_function import _Function
from mindspore.common.recompute import _RecomputeCell
from mindspore.graph._utils import pijit_context
from mindspore.ops.auto_generate import grouped_matmul_v4
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op
from mindspore.ops.primitive import constexpr
from mindspore.train import serialization

__all__ = [
    "AmpLevel",
    "Function",
    "being_compiled",
    "check_before_loading",
    "communication_is_initialised",
    "dist_comm_irecv_op",
    "dist_comm_isend_op",
    "grouped_matmul_v4",
    "join_in_recompute",
    "leave_out_of_capture",
    "mixed_precision_of",
    "parameters_of",
    "pop_amp_strategy",
    "push_amp_strategy",
    "recomputed_otherwise",
    "renew_recompute",
    "replace_in_recompute",
]

# An operator with a gradient of its own, as torch.autograd.Function is one.
Function = _Function


def communication_is_initialised() -> bool:
    """Whether ``mindspore.communication.init`` has been called."""
    return comm.GlobalComm.INITED


def parameters_of(cell: nn.Cell) -> dict:
    """The dict in which a cell keeps its own parameters."""
    return cell._params


@constexpr(check=False)
def _is_none(value):
    return value is None


def _nothing():
    """A function is None for MindSpore's compiler, and only for it."""


def being_compiled():
    """Whether GRAPH_MODE or ``ms.jit`` is compiling the caller; to be asked as in ``sharding.pynative_only``.

    In code that ``leave_out_of_capture`` leaves out, the bytecode mode of ``ms.jit`` runs Python and finds False.
    """
    return _is_none(_nothing)


def leave_out_of_capture(folder: str) -> None:
    """Have ``ms.jit(capture_mode="bytecode")`` call the code of a folder as it is."""
    if pijit_context.SKIP_RULES:  # read once, when something is first captured
        pijit_context.SKIP_RULES["skip_dirs"] = (*pijit_context.SKIP_RULES["skip_dirs"], folder)
    else:
        pi_jit_set_context(skip_files=(folder,))


def check_before_loading(check: Callable[[nn.Cell, dict], None]) -> None:
    """Have ``load_param_into_net``, and ``load_checkpoint`` with a network, call ``check(net, parameters)`` before the
    first parameter is loaded, whichever module the caller has these functions from."""
    own_check = getattr(serialization, "_check_load_param_into_net", None)
    if own_check is None:  # another release: MindSpore's own words remain
        return

    @functools.wraps(own_check)
    def both(net, parameter_dict):
        own_check(net, parameter_dict)
        check(net, parameter_dict)

    serialization._check_load_param_into_net = both


def recomputed_otherwise(cell: nn.Cell) -> bool:
    """Whether ``recompute`` has bound the cell's construct in a form that cannot be renewed."""
    noted = cell._recompute_cell
    return noted is not None and type(noted) is not _RecomputeCell


def renew_recompute(cell: nn.Cell) -> None:
    """Have a recomputed cell recompute what its construct is now."""
    if cell._recompute_cell is not None:
        cell.recompute()


def replace_in_recompute(old, new) -> None:
    """Put a parameter in the place of another wherever ``Cell.recompute`` has noted it.

    A recomputed cell keeps a list of the parameters that it had when ``recompute`` was called, and differentiates with
    respect to these alone. Such lists may belong to cells around the one at hand, which does not know them.
    """
    for cell in gc.get_objects():
        if type(cell) is _RecomputeCell:
            for position, parameter in enumerate(cell.internal_params):
                if parameter is old:
                    cell.internal_params[position] = new


def join_in_recompute(beside, new) -> None:
    """Note a new parameter wherever ``Cell.recompute`` has noted another one of its cell; see above."""
    for cell in gc.get_objects():
        if type(cell) is _RecomputeCell and any(parameter is beside for parameter in cell.internal_params):
            cell.internal_params.append(new)


def mixed_precision_of(cell: nn.Cell):
    """The dtype that ``mindspore.amp.auto_mixed_precision`` or ``to_float`` asks of a cell's products, or None."""
    if cell.mixed_precision_type is not None:
        return {"FP16": ms.float16, "FP32": ms.float32, "BF16": ms.bfloat16}[cell.mixed_precision_type.name]
    strategy = get_curr_amp_strategy()
    if strategy is not None and strategy.get_amp_level() == AmpLevel.AmpAuto:
        return strategy.get_amp_dtype()
    return None
