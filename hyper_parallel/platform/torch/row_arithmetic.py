"""Arithmetic on rows, without gradients, that reads and writes memory as seldom as it can.

On a CPU what lies between two steps is formed for one block of rows at a time, so that it stays in the processor's
cache; the 32-bit products of a whole 16-bit tensor would be written to memory and read again.

Shape suffixes: R rows, T rows before they are copied, N features of any kind.
"""

import torch
import torch.nn.functional as F

__all__ = ["BLOCK_ELEMENTS", "scale_rows", "row_products", "sum_copies"]

# Elements of one tensor in a block: a few such blocks of float32 fit into a core's 2 MiB of cache.
BLOCK_ELEMENTS = 2**17


def scale_rows(rows_RN, scores_R, out=None):
    """Rows times their scores, formed in the wider dtype, in the dtype of the rows. ``out`` may be the rows."""
    out = torch.empty_like(rows_RN, memory_format=torch.contiguous_format) if out is None else out
    for rows, scores, scaled in _blocks(rows_RN, scores_R.unsqueeze(1), out):
        if rows.is_cpu or rows.dtype == scores.dtype:
            torch.mul(rows, scores, out=scaled)
        else:  # not every device casts into ``out``
            scaled.copy_(rows * scores)
    return out


def row_products(a_RN, b_RN, dtype):
    """The inner product of each row of a with the same row of b, formed in the wider dtype, as ``dtype`` [R]."""
    products_R = torch.empty(a_RN.shape[0], dtype=dtype, device=a_RN.device)
    wider = torch.promote_types(a_RN.dtype, dtype)
    for a, b, products in _blocks(a_RN, b_RN, products_R):
        torch.sum(a.to(wider) * b, 1, dtype=dtype, out=products)
    return products_R


def sum_copies(x_RN, inverse_R, copies):
    """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``: [T, ...]."""
    if copies == 1:
        return x_RN.index_select(0, inverse_R)
    num_rows = x_RN.shape[0] // copies
    if x_RN.is_cpu and x_RN.dim() == 2 and num_rows:
        # It gathers and adds in one pass, and adds 16-bit rows in float32.
        return F.embedding_bag(inverse_R.view(num_rows, copies), x_RN.contiguous(), mode="sum")
    return x_RN.index_select(0, inverse_R).reshape(num_rows, copies, *x_RN.shape[1:]).sum(1)


def _blocks(first_RN, *others):
    """The tensors cut alike along their rows; not cut on devices, where each step is a kernel to launch."""
    size = max(1, BLOCK_ELEMENTS // max(1, first_RN.shape[1])) if first_RN.is_cpu else max(1, first_RN.shape[0])
    return zip(*(tensor.split(size) for tensor in (first_RN, *others)))
