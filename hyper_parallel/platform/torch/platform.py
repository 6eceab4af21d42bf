"""The verbs of ``Platform`` on PyTorch."""

import os

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch import collectives, kernels, sharding

__all__ = ["TorchPlatform"]


class TorchPlatform(Platform):
    name = "torch"

    def is_module(self, obj):
        return isinstance(obj, nn.Module)

    def is_tensor(self, obj):
        return isinstance(obj, torch.Tensor) and not isinstance(obj, dt.DTensor)

    def is_mesh(self, obj):
        return isinstance(obj, DeviceMesh)

    def public_class(self, name):
        if name == "DeviceMesh":
            return DeviceMesh
        from hyper_parallel.platform.torch import modules

        return getattr(modules, name)

    # Modules

    def parameters(self, module):
        return dict(module.named_parameters(recurse=False))

    def named_modules(self, module):
        return module.named_modules()

    def replaced_forward(self, module):
        return "forward" in module.__dict__

    def wrap_forward(self, module, label, wrapper):
        sharding.wrap_forward(module, label, wrapper)

    def label(self, module):
        return getattr(type(module), sharding.LABEL, None)

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
        mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=names)
        if device_type == "cpu":
            _share_time_limit(mesh)
        return mesh

    def distribute_tensor(self, tensor, device_mesh, placements):
        return dt.distribute_tensor(tensor, device_mesh, sharding.to_torch(placements))

    def distribute_module(self, module, device_mesh, partition_fn, input_fn, output_fn):
        return dt.distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)

    def shard_parameter(self, module, name, device_mesh, placements):
        sharding.shard_parameter(module, name, device_mesh, placements)

    def is_sharded(self, parameter):
        return isinstance(parameter, dt.DTensor)

    # Integers

    def is_integer(self, tensor):
        return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)

    def on_host(self, tensor):
        return tensor.device.type == "cpu"

    def to_host(self, *tensors):
        values = torch.cat([tensor.to(torch.int64) for tensor in tensors]).tolist()
        ends = torch.tensor([tensor.shape[0] for tensor in tensors]).cumsum(0).tolist()
        return [values[start:end] for start, end in zip([0, *ends], ends)]

    def int_tensor(self, values, like):
        return torch.as_tensor(values, dtype=torch.int64).to(like.device, non_blocking=True)

    # Rows

    def take_rows(self, x, index_R, inverse_R, copies=1):
        return kernels.TakeRows.apply(x, index_R, inverse_R, copies)

    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        device_type = x_RD.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            x_RD, w1_EHD, w2_EDH, w3_EHD = (value.to(dtype) for value in (x_RD, w1_EHD, w2_EDH, w3_EHD))
        groups = kernels.row_groups(num_tokens_per_expert_E.tolist())
        return kernels.SwiGLUExperts.apply(x_RD, w1_EHD, w2_EDH, w3_EHD, scores_R, groups)

    def same_dtype(self, x, weight):
        return x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)

    def swiglu(self, gate, up):
        return kernels.SwiGLU.apply(gate, up)

    # Routing

    def top_k(self, logits_TE, top_k, score_func, normalize, scale):
        logits_TE = logits_TE.float() if logits_TE.dtype in (torch.float16, torch.bfloat16) else logits_TE
        scores_TE = torch.softmax(logits_TE, 1) if score_func == "softmax" else torch.sigmoid(logits_TE)
        scores_TK, selected_TK = torch.topk(scores_TE, top_k, dim=1)
        if normalize:
            scores_TK = scores_TK / scores_TK.sum(1, keepdim=True)
        return scores_TK * scale, selected_TK

    def sort_by_expert(self, selected_TK, num_experts):
        experts_R = selected_TK.reshape(-1)
        order_R = torch.argsort(experts_R, stable=True)
        inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        return order_R, inverse_R, torch.bincount(experts_R, minlength=num_experts)

    def reshape(self, x, shape):
        return x.reshape(shape)

    def sum_copies(self, x_TKD):
        return x_TKD.sum(1)

    # Collectives

    def exchange_counts(self, counts, group, name):
        return collectives.exchange_counts(counts, group, name)

    def all_to_all_rows(self, x, send_splits, recv_splits, group, name):
        return collectives.AllToAllRows.apply(x, send_splits, recv_splits, group, name)

    def copy_to_group(self, x, group, name):
        return collectives.CopyToGroup.apply(x, group, name)

    def reduce_from_group(self, x, group, name):
        return collectives.ReduceFromGroup.apply(x, group, name)

    def digests(self, x, group, name):
        x = x.detach().double().reshape(x.shape[0], -1)
        weights = torch.arange(1.0, x.shape[0] + 1, dtype=x.dtype, device=x.device)
        digest = torch.stack([torch.tensor(float(x.shape[0])).to(x), x.sum(), x.square().sum(), x.sum(1) @ weights])
        return collectives.all_gather_vector(digest, group, name).tolist()


def _share_time_limit(mesh):
    """Give the mesh's own groups the time limit of the default group.

    torch gives a new group its default of 30 minutes, whatever the user set for the default group; a rank that never
    comes would be waited for that long.
    """
    default = dist.group.WORLD._get_backend(torch.device("cpu"))
    for axis in range(mesh.ndim):
        dist.distributed_c10d._set_pg_timeout(default.options._timeout, mesh.get_group(axis))
