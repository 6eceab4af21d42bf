"""The verbs of ``Platform`` on MindSpore."""

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.expert_parallel import moe
from hyper_parallel.platform.mindspore import collectives, device_mesh, kernels, sharding
from hyper_parallel.platform.mindspore import cpu_collectives as backend
from hyper_parallel.platform.platform import Platform

__all__ = ["MindSporePlatform"]

INTEGERS = (ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64)


class MindSporePlatform(Platform):
    name = "mindspore"

    def is_module(self, obj):
        return isinstance(obj, nn.Cell)

    def is_tensor(self, obj):
        return isinstance(obj, Tensor)

    def is_mesh(self, obj):
        return isinstance(obj, device_mesh.DeviceMesh)

    def public_class(self, name):
        if name == "DeviceMesh":
            return device_mesh.DeviceMesh
        from hyper_parallel.platform.mindspore import modules

        return getattr(modules, name)

    # Modules

    def parameters(self, module):
        return dict(module._params)

    def named_modules(self, module):
        return module.cells_and_names()

    def replaced_forward(self, module):
        return "construct" in module.__dict__

    def wrap_forward(self, module, layer):
        sharding.wrap_construct(module, layer)

    def parallel_layer(self, module):
        return getattr(type(module), sharding.LAYER, None)

    # Meshes and layouts

    def world_size(self, device_type):
        device_mesh.check_device_type(device_type)
        return comm.get_group_size()

    def init_device_mesh(self, device_type, shape, names):
        return device_mesh.init_device_mesh(device_type, shape, names)

    def distribute_tensor(self, tensor, device_mesh, placements):
        return sharding.distribute(tensor, device_mesh, placements)

    def distribute_module(self, module, device_mesh, partition_fn, input_fn, output_fn):
        if partition_fn is not None:
            for name, cell in list(module.cells_and_names()):
                partition_fn(name, cell, device_mesh)
        if input_fn is not None:
            module.register_forward_pre_hook(lambda cell, inputs: input_fn(cell, inputs, device_mesh))
        if output_fn is not None:
            module.register_forward_hook(lambda cell, inputs, outputs: output_fn(cell, outputs, device_mesh))
        return module

    def shard_parameter(self, module, name, device_mesh, placements):
        sharding.shard_parameter(module, name, device_mesh, placements)

    def is_sharded(self, parameter):
        return isinstance(parameter, sharding.ShardedParameter)

    # Integers

    def is_integer(self, tensor):
        return tensor.dtype in INTEGERS

    def on_host(self, tensor):
        return ms.get_context("device_target") == "CPU"

    def to_host(self, *tensors):
        values = mint.cat([tensor.astype(ms.int64) for tensor in tensors]).asnumpy()
        ends = np.cumsum([tensor.shape[0] for tensor in tensors])[:-1]
        return [part.tolist() for part in np.split(values, ends)]

    def int_tensor(self, values, like):
        return Tensor(np.asarray(values, np.int64))

    # Rows

    def take_rows(self, x, index_R, inverse_R, copies=1):
        return kernels.TakeRows.apply(x, index_R, inverse_R, copies)

    def gather_rows(self, x, index_R):
        return kernels.GatherRows.apply(x, index_R)

    def sum_rows(self, x, index_R, num_rows):
        return kernels.SumRows.apply(x, index_R, num_rows)

    def concat(self, tensors, dim):
        return mint.cat(tensors, dim)

    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        return moe.experts_from_products(kernels, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)

    def same_dtype(self, x, weight):
        return x.dtype == weight.dtype

    def swiglu(self, gate, up):
        return kernels.swiglu(gate, up)

    # Routing. MindSpore's CPU backend lacks many index operators; numpy has them, and reads tensors in place.

    def probabilities(self, logits_TE, score_func):
        logits_TE = logits_TE.astype(ms.float32) if logits_TE.dtype in (ms.float16, ms.bfloat16) else logits_TE
        if logits_TE.shape[0] == 0:
            return logits_TE
        return mint.softmax(logits_TE, -1) if score_func == "softmax" else mint.sigmoid(logits_TE)

    def detach(self, x):
        return ops.stop_gradient(x)

    def top_indices(self, x_TE, k):
        return Tensor(np.argsort(-x_TE.asnumpy(), axis=-1, kind="stable")[:, :k].astype(np.int64))

    def pick(self, x_TE, index_TK):
        return kernels.Pick.apply(x_TE, index_TK)

    def mark(self, index_TK, size):
        marks_TE = np.zeros((index_TK.shape[0], size), np.float32)
        np.put_along_axis(marks_TE, index_TK.asnumpy(), 1.0, axis=1)
        return Tensor(marks_TE)

    def marked_positions(self, marks, num_marked):
        return Tensor(np.flatnonzero(marks.asnumpy()).astype(np.int64))

    def to_int(self, x):
        return x.astype(ms.int64)

    def sort_by_expert(self, selected_TK, num_experts):
        experts_R = selected_TK.asnumpy().reshape(-1)
        order_R = np.argsort(experts_R, kind="stable")
        inverse_R = np.empty_like(order_R)
        inverse_R[order_R] = np.arange(len(order_R))
        counts_E = np.bincount(experts_R, minlength=num_experts)
        return tuple(Tensor(values.astype(np.int64)) for values in (order_R, inverse_R, counts_E))

    def scale_rows(self, x_RD, scores_R):
        return (x_RD * scores_R.reshape((scores_R.shape[0], 1))).astype(x_RD.dtype)

    def count_in_backward(self, x, counter_E, counts_E):
        return kernels.CountInBackward.apply(x, counter_E, counts_E)

    def assign(self, buffer, value):
        buffer.set_data(value.astype(buffer.dtype))

    # Collectives

    def start_counts_exchange(self, counts, group, name):
        size = comm.get_group_size(group)
        splits = (counts.shape[0] // size,) * size
        return backend.AllToAll(counts.astype(ms.int64), splits, splits, group, name)

    def all_to_all_rows(self, x, send_splits, recv_splits, group, name):
        return collectives.AllToAllRows.apply(x, send_splits, recv_splits, group, name)

    def copy_to_group(self, x, group, name):
        return collectives.CopyToGroup.apply(x, group, name)

    def reduce_from_group(self, x, group, name):
        return collectives.ReduceFromGroup.apply(x, group, name)

    def split_over_group(self, x, splits, group, name):
        return collectives.SplitOverGroup.apply(x, splits, group, name)

    def gather_from_group(self, x, splits, group, name):
        return collectives.GatherFromGroup.apply(x, splits, group, name)

    def sum_over_group(self, x, group, name):
        return backend.all_reduce(x, group, name)

    def digests(self, x, group, name):
        rows = x.asnumpy().reshape(x.shape[0], int(np.prod(x.shape[1:]))).astype(np.float64)
        digest = [x.shape[0], rows.sum(), np.square(rows).sum(), rows.sum(1) @ np.arange(1, x.shape[0] + 1)]
        gathered = backend.all_gather(Tensor(np.asarray(digest, np.float64)), group, name)
        return [vector.asnumpy().tolist() for vector in gathered]
