"""The verbs of ``Platform`` on MindSpore."""

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.expert_parallel import moe
from hyper_parallel.platform.mindspore import collectives, device, device_mesh, kernels, sharding
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
        return not device.on_ascend() or kernels.host_values(tensor) is not None

    def to_host(self, *tensors):
        known = [kernels.host_values(tensor) for tensor in tensors]
        copied = [tensor.astype(ms.int64) for tensor, values in zip(tensors, known) if values is None]
        ends = np.cumsum([tensor.shape[0] for tensor in copied])[:-1]
        pieces = iter(np.split(mint.cat(copied).asnumpy(), ends) if copied else ())
        return [(next(pieces) if values is None else values).tolist() for values in known]

    def int_tensor(self, values, like):
        return kernels.int_tensor(values)

    # Rows

    def take_rows(self, x, index_R, inverse_R, copies=1):
        return device.kernels().TakeRows.apply(x, index_R, inverse_R, copies)

    def sum_copies(self, x_RD, index_R, inverse_R, copies):
        return device.kernels().SumCopies.apply(x_RD, index_R, inverse_R, copies)

    def gather_rows(self, x, index_R):
        return device.kernels().GatherRows.apply(x, index_R)

    def sum_rows(self, x, index_R, num_rows):
        return device.kernels().SumRows.apply(x, index_R, num_rows)

    def concat(self, tensors, dim):
        return mint.cat(tensors, dim)

    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        inputs = x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R
        return moe.experts_from_products(device.kernels(), *inputs)

    def same_dtype(self, x, weight):
        return x.dtype == weight.dtype

    def swiglu(self, gate, up):
        return device.kernels().swiglu(gate, up)

    # Routing

    def probabilities(self, logits_TE, score_func):
        logits_TE = logits_TE.astype(ms.float32) if logits_TE.dtype in (ms.float16, ms.bfloat16) else logits_TE
        if logits_TE.shape[0] == 0:
            return logits_TE
        return mint.softmax(logits_TE, -1) if score_func == "softmax" else mint.sigmoid(logits_TE)

    def detach(self, x):
        return ops.stop_gradient(x)

    def top_indices(self, x_TE, k):
        return device.kernels().top_indices(x_TE, k)

    def pick(self, x_TE, index_TK):
        return device.kernels().Pick.apply(x_TE, index_TK)

    def mark(self, index_TK, size):
        return device.kernels().mark(index_TK, size)

    def marked_positions(self, marks, num_marked):
        return device.kernels().marked_positions(marks, num_marked)

    def to_int(self, x):
        return x.astype(ms.int64)

    def sort_by_expert(self, selected_TK, num_experts):
        return device.kernels().sort_by_expert(selected_TK, num_experts)

    def scale_rows(self, x_RD, scores_R):
        return (x_RD * scores_R.reshape((scores_R.shape[0], 1))).astype(x_RD.dtype)

    def count_in_backward(self, x, counter_E, counts_E):
        return device.kernels().CountInBackward.apply(x, counter_E, counts_E)

    def assign(self, buffer, value):
        buffer.set_data(value.astype(buffer.dtype))

    # Collectives

    def start_counts_exchange(self, counts, group, name):
        size = comm.get_group_size(group)
        splits = (counts.shape[0] // size,) * size
        return device.collectives().AllToAll(counts.astype(ms.int64), splits, splits, group, name)

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

    def sum_over_group(self, x, group, name):
        return device.collectives().all_reduce(x, group, name)

    def digests(self, x, group, name):
        rows = x.asnumpy().reshape(x.shape[0], int(np.prod(x.shape[1:]))).astype(np.float64)
        digest = [x.shape[0], rows.sum(), np.square(rows).sum(), rows.sum(1) @ np.arange(1, x.shape[0] + 1)]
        # As integers of the same bits: not every backend and device takes float64.
        bits = Tensor(np.asarray(digest, np.float64).view(np.int64))
        gathered = device.collectives().all_gather(bits, group, name)
        return [vector.asnumpy().view(np.float64).tolist() for vector in gathered]
