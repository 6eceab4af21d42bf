"""The verbs of ``Platform`` on PyTorch."""

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch import collectives, compat, device, gradients, host, operators, routing, sharding

__all__ = ["TorchPlatform"]


class TorchPlatform(Platform):
    name = "torch"

    def is_module(self, obj):
        return isinstance(obj, nn.Module)

    def is_tensor(self, obj):
        return isinstance(obj, torch.Tensor) and obj.layout == torch.strided and not isinstance(obj, dt.DTensor)

    def is_mesh(self, obj):
        return isinstance(obj, DeviceMesh)

    def public_object(self, name):
        if name == "DeviceMesh":
            return DeviceMesh
        if name == "ops_to_save":
            return collectives.ops_to_save
        from hyper_parallel.platform.torch import modules

        return getattr(modules, name)

    # Modules

    def parameters(self, module):
        return dict(module.named_parameters(recurse=False))

    def buffers(self, module):
        return dict(module.named_buffers(recurse=False))

    def named_modules(self, module):
        return module.named_modules()

    def replaced_forward(self, module):
        return "forward" in module.__dict__

    def wrap_forward(self, module, sharded):
        return sharding.wrap_forward(module, sharded)

    def sharded(self, module):
        return sharding.sharded_of(module)

    def casts_inputs(self, module):
        return isinstance(module, FSDPModule)

    def packed_experts(self):
        from hyper_parallel.platform.torch import packed

        return packed

    @compat.never_compiled
    def eagerly(self, function, *args):
        return function(*args)

    def as_operator(self, module, method, parts, *inputs):
        if torch.compiler.is_compiling() and operators.can_be_operator(module, parts):
            return operators.call(module, method, parts, inputs)
        return self.eagerly(getattr(module, method), *inputs)

    # Meshes and layouts

    def world_size(self, device_type):
        if dist.is_initialized():
            return dist.get_world_size()
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            # Under torchrun; torch's init_device_mesh initialises the default group itself.
            return int(os.environ["WORLD_SIZE"])
        raise RuntimeError(
            "torch.distributed is not initialised; start the script with torchrun, or call "
            'torch.distributed.init_process_group("gloo") first ("hccl" on npu, "nccl" on cuda)'
        )

    def init_device_mesh(self, device_type, shape, names):
        ranks = range(math.prod(shape))
        with operation(f"init_device_mesh{shape}: making the process groups", ranks, int(os.environ.get("RANK", 0))):
            if device_type == "cpu" and dist.is_initialized():
                mesh = _mesh_with_time_limit(shape, names)
            else:
                mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=names)
        if device_type == "cpu":
            collectives.let_gloo_finish_before_exit()
        return mesh

    def distribute_tensor(self, tensor, device_mesh, placements):
        return dt.distribute_tensor(tensor, device_mesh, sharding.to_torch(placements))

    def distribute_module(self, module, device_mesh, partition_fn, input_fn, output_fn):
        return dt.distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)

    def shard_parameter(self, module, name, device_mesh, placements):
        sharding.shard_parameter(module, name, device_mesh, placements)
        if device_mesh.device_type == "cpu":  # also of a mesh that torch's own init_device_mesh made
            collectives.let_gloo_finish_before_exit()

    def add_parameter(self, module, name, shape, bound, like, device_mesh, placements):
        local = like.to_local()
        dtype = torch.float32 if local.dtype.itemsize <= 2 else local.dtype
        whole = torch.empty(shape, dtype=dtype, device=local.device).uniform_(-bound, bound)
        module.register_parameter(name, nn.Parameter(whole))
        self.shard_parameter(module, name, device_mesh, placements)

    def local(self, parameter):
        return sharding.local(parameter)

    def is_sharded(self, parameter):
        return isinstance(parameter, dt.DTensor)

    def local_tokens(self, x, device_mesh, placement):
        return sharding.local_tokens(x, device_mesh, placement)

    def distributed_tokens(self, x, device_mesh, placement, shape):
        return sharding.distributed_tokens(x, device_mesh, placement, shape)

    # Dtypes and devices

    def dtype_name(self, value):
        return host.dtype_name(value)

    def is_floating(self, value):
        return host.dtype_name(value) in ("float16", "bfloat16", "float32", "float64")

    def same_device(self, x, weight):
        return x.device == weight.device and x.device.type != "meta"

    def needs_gradient(self, x):
        return x.requires_grad and torch.is_grad_enabled()

    # Integers

    def is_integer(self, tensor):
        return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)

    def on_host(self, tensor):
        return host.on_host(tensor)

    def to_host(self, *tensors):
        return host.to_host(*tensors)

    def int_tensor(self, values, like):
        return host.int_tensor(values, like)

    def int_tensors(self, arrays, like):
        return host.int_tensors(arrays, like)

    def made_by_host(self, tensor):
        return host.made_by_host(tensor)

    # Rows

    def permute(self, x, order_R, inverse_R, copies=1):
        return device.rows(x).permute(x, order_R, inverse_R, copies)

    def unpermute(self, x_RD, order_R, inverse_R, copies):
        return device.rows(x_RD).unpermute(x_RD, order_R, inverse_R, copies)

    def index_select(self, x, index_R):
        return device.rows(x).index_select(x, index_R)

    def index_add(self, x, index_R, num_rows):
        return device.rows(x).index_add(x, index_R, num_rows)

    def concat(self, tensors, dim):
        return torch.cat(tensors, dim)

    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        device_type = x_RD.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            x_RD, w1_EHD, w2_EDH, w3_EHD = (value.to(dtype) for value in (x_RD, w1_EHD, w2_EDH, w3_EHD))
        experts = device.experts(x_RD).swiglu_experts
        return experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)

    def grouped_linear(self, x_RD, w_END, num_tokens_per_expert_E):
        device_type = x_RD.device.type
        if torch.is_autocast_enabled(device_type):
            x_RD = x_RD.to(torch.get_autocast_dtype(device_type))
        return device.experts(x_RD).grouped_linear(x_RD, w_END.to(x_RD.dtype), num_tokens_per_expert_E)

    def add_products(self, w, left_ENr, right_ErK, factor):
        w_ENK = w.reshape(left_ENr.shape[0], left_ENr.shape[1], right_ErK.shape[2])
        factors = left_ENr.to(w.dtype), right_ErK.to(w.dtype)
        return torch.baddbmm(w_ENK, *factors, alpha=factor).reshape(w.shape)

    def same_dtype(self, x, weight):
        return x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)

    def swiglu(self, gate, up):
        return device.experts(gate).swiglu(gate, up)

    # Routing

    def probabilities(self, logits_TE, score_func):
        return routing.probabilities(logits_TE, score_func)

    def detach(self, x):
        return x.detach()

    def top_indices(self, x_TE, k):
        return routing.top_indices(x_TE, k)

    def take_along(self, x_TE, index_TK):
        return routing.take_along(x_TE, index_TK)

    def multi_hot(self, index_TK, size):
        return routing.multi_hot(index_TK, size)

    def nonzero(self, x, num_nonzero):
        return device.routing(x).nonzero(x, num_nonzero)

    def floor_divide(self, x, divisor):
        return device.routing(x).floor_divide(x, divisor)

    def to_int(self, x):
        return x.to(torch.int64)

    def sort_by_expert(self, selected_TK, num_experts):
        return device.routing(selected_TK).sort_by_expert(selected_TK, num_experts)

    def scale_rows(self, x_RD, scores_R):
        return device.rows(x_RD).scale_rows(x_RD, scores_R)

    def count_in_backward(self, x, counter_E, counts_E):
        return routing.count_in_backward(x, counter_E, counts_E)

    def assign(self, buffer, value):
        buffer.copy_(value)

    # Collectives

    def start_counts_exchange(self, counts, group, name, also=()):
        return device.counts_exchange(counts)(counts, group, name, also)

    def all_to_all_rows(self, x, send_splits, recv_splits, group, name):
        return collectives.AllToAllRows.apply(x, send_splits, recv_splits, group, name)

    def copy_to_group(self, x, group, name, dtype=None):
        return collectives.CopyToGroup.apply(x, group, name, dtype)

    def reduce_from_group(self, x, group, name, dtype=None):
        return collectives.ReduceFromGroup.apply(x, group, name, dtype)

    def split_over_group(self, x, splits, group, name):
        return collectives.SplitOverGroup.apply(x, splits, group, name)

    def gather_from_group(self, x, splits, group, name):
        return collectives.GatherFromGroup.apply(x, splits, group, name)

    def gather_tokens(self, x, splits, group, name, dtype=None):
        return collectives.GatherTokens.apply(x, splits, group, name, dtype)

    def scatter_tokens(self, terms, complete, splits, group, name, dtype=None):
        return collectives.ScatterTokens.apply(terms, complete, splits, group, name, dtype)

    def sum_over_group(self, x, group, name):
        return collectives.all_reduce(x, group, name)

    def rows_with_nan(self, x):
        return routing.rows_with_nan(x)

    def digests(self, x, group, name):
        return routing.digests(x, group, name)

    # Training

    def gradients(self):
        return gradients.VERBS


def _mesh_with_time_limit(shape: Sequence[int], names: Sequence[str] | None) -> DeviceMesh:
    """A mesh of CPU ranks whose groups have the time limit of the default group from the start.

    torch gives a new group its default of 30 minutes, whatever the user set for the default group; a rank that never
    comes to make the groups, or to a collective on them, would be waited for that long.
    """
    limit = compat.default_time_limit("cpu")
    backends = dict.fromkeys(names or range(len(shape)), ("gloo", compat.gloo_options(limit)))
    mesh = dist.init_device_mesh("cpu", tuple(shape), mesh_dim_names=names, backend_override=backends)
    for axis in range(mesh.ndim):  # an axis over all ranks is the default group itself, or one that existed
        compat.set_time_limit(mesh.get_group(axis), limit)
    return mesh
