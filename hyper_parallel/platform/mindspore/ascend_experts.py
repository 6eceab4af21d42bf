"""Experts on Ascend devices. The names and meanings are those of ``experts``.

Written after the documents of MindSpore 2.10 and CANN; there was no device to run it on. Where an operator's document
excludes a case, the portable code computes, from operators that every MindSpore device has.

``grouped_matmul_v4`` has a gradient for ``split_item=3, group_type=0`` only. MindSpore's document asks for positive
counts; CANN's (aclnnGroupedMatmulV4) allows 0 as well, but the part of a result that no count speaks of is not written,
and the weights' gradient of an expert without rows would be such a part. So only the experts with rows are handed over:
the gradient of leaving out the others is zero for them.

Shape suffixes: R rows, E experts, D input features, N output features, H hidden size.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import experts
from hyper_parallel.platform.mindspore.compat import grouped_matmul_v4
from hyper_parallel.platform.mindspore.experts import LinearOfNoRows

__all__ = ["LinearOfNoRows", "grouped_linear", "product_of_groups", "swiglu", "swiglu_experts", "swiglu_of_halves"]

DTYPES = (ms.float16, ms.bfloat16, ms.float32)
# Limits in the document of aclnnGroupedMatmulV4.
MAX_GROUPS = 1024
MAX_FEATURES = 65535


def swiglu_experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
    """``scores * w2(silu(w1 x) * (w3 x))`` for the rows of each expert."""
    inputs = x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R
    return experts.experts_from_products(grouped_linear, swiglu, *inputs)


def product_of_groups(x_RD, w_EDN, counts_E):
    """``x @ w[e]`` for ``counts[e]`` rows after each other; all counts positive, int64 on the device."""
    # group_list_type=1: counts, not their running sum.
    return grouped_matmul_v4([x_RD], [w_EDN], group_list=counts_E, split_item=3, group_type=0, group_list_type=1)[0]


def swiglu_of_halves(gate_and_up):
    """``silu(first half of the last dim) * second half``."""
    return ops.swiglu(gate_and_up, -1)


def grouped_linear(x_RD, w_END, groups):
    """``y = x @ w[e].T`` for the rows of each expert e: [R, N]."""
    counts = {expert: stop - start for expert, start, stop in groups}
    # Older documents of CANN exclude a list of one group; that is one product anyway.
    fits = 1 < len(counts) <= MAX_GROUPS and max(w_END.shape[1:]) <= MAX_FEATURES and x_RD.dtype in DTYPES
    if not fits:
        return experts.grouped_linear(x_RD, w_END, groups)
    if len(counts) < w_END.shape[0]:
        w_END = ops.gather(w_END, Tensor(np.array(list(counts), np.int64)), 0)
    w_EDN = ops.transpose(w_END, (0, 2, 1)).contiguous()
    group_list = Tensor(np.array(list(counts.values()), np.int64))
    return grouped_matmul_v4([x_RD], [w_EDN], group_list=group_list, split_item=3, group_type=0, group_list_type=1)[0]


def swiglu(gate, up, scores=None):
    """``silu(gate) * up``, times one score per row where given."""
    if 0 in gate.shape or gate.dtype not in DTYPES:
        return experts.swiglu(gate, up, scores)
    hidden = swiglu_of_halves(mint.cat((gate, up), -1))
    return hidden if scores is None else (hidden * scores.reshape((scores.shape[0], 1))).astype(gate.dtype)
