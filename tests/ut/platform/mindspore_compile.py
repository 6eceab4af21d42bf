"""What MindSpore's compiler and signatures say of the operators for Ascend devices, on a machine without one.

The compiler checks arguments and shapes, builds the gradient, and only then looks for a kernel. So on CPU an operator
that is used rightly, and whose gradient is registered, ends in "Unsupported op [...] on CPU"; wrong arguments and a
missing gradient are other errors. Run as a program, this prints what was found as JSON.
"""

import inspect
import json
import re

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, mint, ops
from mindspore.mint import distributed
from mindspore.ops.auto_generate import grouped_matmul_v4

from hyper_parallel.platform.mindspore import ascend_experts, ascend_rows

ROWS, FEATURES, EXPERTS = 6, 16, 3
COUNTS = Tensor(np.array([1, 2, 3]), ms.int64)
POSITIONS = Tensor(np.arange(ROWS), ms.int32)
DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}


def product_of_groups(x, w):
    return ascend_experts.product_of_groups(x, w, COUNTS)


def swiglu_of_halves(x):
    return ascend_experts.swiglu_of_halves(x)


def sum_of_copies(rows, ones):
    return ascend_rows.sum_of_copies(rows, POSITIONS, ones)


def separate_outputs(x, w):
    """A use of the same operator that has no gradient."""
    return grouped_matmul_v4([x], [w], split_item=0, group_type=-1)[0]


def without_gradient(x):
    """An operator for which none is registered."""
    return ops.moe_init_routing_v2(x, Tensor(np.zeros((ROWS, 1)), ms.int32), ROWS, 0, 0, 0, 0, False)[0]


def wrong_shapes(x, w):
    return ascend_experts.product_of_groups(x, w[:, 1:], COUNTS)


CASES = {
    product_of_groups: ((ROWS, FEATURES), (EXPERTS, FEATURES, 32)),
    swiglu_of_halves: ((ROWS, FEATURES),),
    sum_of_copies: ((ROWS, FEATURES), (ROWS // 2, 2)),
    separate_outputs: ((ROWS, FEATURES), (FEATURES, 32)),
    without_gradient: ((ROWS, FEATURES),),
    wrong_shapes: ((ROWS, FEATURES), (EXPERTS, FEATURES, 32)),
}
SIGNATURES = {
    "all_to_all_single": distributed.all_to_all_single,
    "all_reduce": distributed.all_reduce,
    "broadcast": distributed.broadcast,
    "all_gather": distributed.all_gather,
    "create_group": communication.create_group,
    "grouped_matmul_v4": grouped_matmul_v4,
    "swiglu": ops.swiglu,
    "moe_token_unpermute": ops.moe_token_unpermute,
    "topk": mint.topk,
    "sort": mint.sort,
    "searchsorted": mint.searchsorted,
    "scatter": mint.scatter,
    "gather": mint.gather,
    "gather (ops)": ops.gather,
    "unsorted_segment_sum": ops.unsorted_segment_sum,
    "cat": mint.cat,
    "matmul": mint.matmul,
    "sigmoid": mint.sigmoid,
    "softmax": mint.softmax,
}


def outcome(function, *inputs):
    """The operator without a kernel, or the error."""
    try:
        function(*inputs)
    except Exception as error:
        missing = re.search(r"Unsupported op \[(\w+)\] on CPU", str(error))
        return f"no kernel: {missing[1]}" if missing else f"{type(error).__name__}: {str(error).strip()[:300]}"
    return "ran"


def summed(function):
    def total(*inputs):
        return function(*inputs).sum()

    return total


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    compiled = {}
    for function, shapes in CASES.items():
        for name, dtype in DTYPES.items():
            inputs = [Tensor(np.ones(shape), dtype) for shape in shapes]
            gradient = ms.grad(summed(function), tuple(range(len(inputs))))
            compiled[f"{function.__name__} {name}"] = outcome(ms.jit(function), *inputs), outcome(gradient, *inputs)
    signatures = {name: list(inspect.signature(function).parameters) for name, function in SIGNATURES.items()}
    platforms = {
        name: re.findall(r"``(\w+)``", re.search(r"Supported Platforms:\s*(.*)", inspect.getdoc(function))[1])
        for name, function in SIGNATURES.items()
    }
    print(json.dumps({"compiled": compiled, "signatures": signatures, "platforms": platforms}))


if __name__ == "__main__":
    main()
