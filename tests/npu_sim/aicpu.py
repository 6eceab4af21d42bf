"""Operators that CANN runs on the AICPU of Atlas A2 and A3, which is far slower than their AI cores.

CANN decides by operator and dtype: what its sources (repositories hicann/ops-math and hicann/ops-nn, at the commits
given, of 2025 and 2026) do not list as a dtype of the AI core for 910B and 910_93, the chips of A2 and A3, runs on the
AICPU. The table holds what was looked up there; of an operator that is missing it says nothing.
"""

import torch

__all__ = ["AI_CORE", "calls", "note", "reset"]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I8, I32, I64, U8, BOOL = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool

# Dtypes of the first tensor that run on the AI cores.
SORT = {F32, F16, BF16}  # ops-math 30c17129, math/sort/op_api/sort.cpp; an axis of one element never does
TOPK = {F32, F16, BF16}  # ops-math, topk.cpp
SCATTER = {F32, F16, BF16, I32, I8, U8}  # ops-nn ddfabaa9, index/scatter_elements_v2/op_api/scatter_elements.cpp
CUMSUM = {F32, F16, BF16, I32}  # ops-math bfebfe8e, math/cumsum/op_api/cumsum.cpp
# ops-math, math/floor_div/op_api/floordiv.cpp. Commit 86264b69 (2026-03-12) adds int64; the releases before it do not.
FLOOR_DIVIDE = {F32, F16, BF16, I32, I8, U8}
MASKED_FILL = {F32, F16, BF16, BOOL, I8, I32}  # ops-math 7416cb15, conversion/masked_fill/op_api/masked_fill.cpp
NONZERO = {F32, F16, BF16, BOOL, I8, U8}  # ops-nn, nonzero.cpp
# ops-math 4bd2eccc, math/bincount/op_api/bincount.cpp; searchsorted.cpp, unique_with_counts_and_sorting.cpp
NONE = set()

AI_CORE = {
    "sort": SORT,
    "argsort": SORT,
    "topk": TOPK,
    "scatter": SCATTER,
    "scatter_": SCATTER,
    "scatter_add": SCATTER,
    "scatter_add_": SCATTER,
    "cumsum": CUMSUM,
    "cumsum_": CUMSUM,
    "floor_divide": FLOOR_DIVIDE,
    "floor_divide_": FLOOR_DIVIDE,
    "masked_fill": MASKED_FILL,
    "masked_fill_": MASKED_FILL,
    "nonzero": NONZERO,
    "bincount": NONE,
    "searchsorted": NONE,
    "bucketize": NONE,
    "_unique2": NONE,
    "unique_consecutive": NONE,
    "unique_dim": NONE,
}

calls = []  # "operator dtype" of every call on the AICPU since `reset`


def reset():
    calls.clear()


def note(operator, args, kwargs):
    """Whether the call runs on the AICPU; it is then added to `calls`."""
    name = operator.partition("::")[2]
    if name not in AI_CORE:
        return False
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    axis_of_one = AI_CORE[name] is SORT and first.dim() and first.shape[-1] == 1
    if first.dtype in AI_CORE[name] and not axis_of_one:
        return False
    calls.append(f"{name} {first.dtype}".replace("torch.", ""))
    return True
