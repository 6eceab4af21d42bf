"""What work costs on the clock of the simulated devices; README.md says where the rates are from."""

import ctypes
from dataclasses import dataclass

__all__ = ["ATLAS_A2", "ATLAS_A3", "Costs", "kernel_ns", "use"]

# Assumed, not measured.
PRODUCT_SHARE, MEMORY_SHARE = 0.55, 0.75
AICPU_NS_PER_ELEMENT = 10.0
PRODUCTS = {"mm", "addmm", "matmul", "bmm", "npu_grouped_matmul", "matmul_backward"}
# They read as much of their first tensor as they write, and not all of it.
TAKES_ROWS = {"index_select", "gather", "index", "embedding"}
ONLY_WRITES = {"fill_", "zero_", "zeros_like", "ones_like", "new_zeros", "new_ones", "full_like"}


@dataclass(frozen=True)
class Costs:
    """Rates in units per ns: floating point operations, and bytes."""

    product_flops: float
    memory_bytes: float
    pair_bytes: float
    rank_bytes: float
    between_hosts_bytes: float
    host_copy_bytes: float
    ranks_per_host: int
    launch_ns: float = 5000.0
    collective_ns: float = 20000.0


ATLAS_A2 = Costs(328e3 * PRODUCT_SHARE, 1600 * MEMORY_SHARE, 19.4, 7 * 19.4, 22.6, 19.7, 8)
ATLAS_A3 = Costs(376e3 * PRODUCT_SHARE, 1600 * MEMORY_SHARE, 123.5, 123.5, 22.7, 33.9, 16)

_used = ATLAS_A2


def use(costs):
    """Take these costs from now on, in this process; all ranks must take the same."""
    global _used
    _used = costs
    ctypes.CDLL("libascendcl.so").npu_sim_set_host_costs(
        ctypes.c_double(costs.launch_ns), ctypes.c_double(costs.host_copy_bytes)
    )
    ctypes.CDLL("libhccl.so").npu_sim_set_link_costs(
        *map(
            ctypes.c_double,
            (costs.collective_ns, costs.pair_bytes, costs.rank_bytes, costs.between_hosts_bytes),
        ),
        costs.ranks_per_host,
    )


def kernel_ns(name, reads, writes, on_aicpu=False):
    """How long a kernel takes that reads and writes these tensors: its products or its memory, whichever is longer."""
    base = name.partition("::")[2]
    reads = () if base in ONLY_WRITES else reads
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (*reads, *writes))
    if base in TAKES_ROWS and reads:
        nbytes += sum(tensor.numel() * tensor.element_size() for tensor in writes)
        nbytes -= reads[0].numel() * reads[0].element_size()
    aicpu = AICPU_NS_PER_ELEMENT * max((tensor.numel() for tensor in reads), default=0) if on_aicpu else 0
    return max(nbytes / _used.memory_bytes, _flops(base, reads, writes) / _used.product_flops) + aicpu


def _flops(base, reads, writes):
    """Two per element of the result and summed element: `K` of a product [M, K] x [K, N]."""
    matrices = [tensor for tensor in reads if tensor.dim() >= 2 and tensor.is_floating_point()]
    if base not in PRODUCTS or len(matrices) < 2:  # a product with a vector is bound by memory
        return 0
    if base == "matmul_backward":  # the gradient of the result, and the two factors
        grad, factor = matrices[0], matrices[1]
        return 2 * len(writes) * grad.numel() * factor.shape[-1]
    if base == "npu_grouped_matmul":
        left, right = matrices[:2]
        # Every row meets the matrix of its own group only.
        return 2 * left.numel() * right.shape[-1]
    left = matrices[-2]
    return 2 * writes[0].numel() * left.shape[-1]
