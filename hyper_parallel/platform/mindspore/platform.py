"""The verbs of ``Platform`` on MindSpore."""

import mindspore as ms
import mindspore.communication as comm
from mindspore import Tensor, mint, nn, ops
from mindspore.common.initializer import Uniform, initializer

from hyper_parallel.core.expert_parallel.experts import row_groups
from hyper_parallel.platform.mindspore import collectives, compat, device, device_mesh, gradients, host, sharding
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

    def public_object(self, name):
        if name == "DeviceMesh":
            return device_mesh.DeviceMesh
        if name == "ops_to_save":
            raise AttributeError("ops_to_save belongs to torch; MindSpore recomputes whole cells and keeps no operator")
        from hyper_parallel.platform.mindspore import modules

        return getattr(modules, name)

    # Modules

    def parameters(self, module):
        return dict(compat.parameters_of(module))

    def buffers(self, module):
        return {}

    def named_modules(self, module):
        return module.cells_and_names()

    def replaced_forward(self, module):
        return "construct" in module.__dict__ or compat.recomputed_otherwise(module)

    def wrap_forward(self, module, sharded):
        return sharding.wrap_construct(module, sharded)

    def sharded(self, module):
        return getattr(type(module), sharding.SHARDED, None)

    def eagerly(self, function, *args):
        return function(*args)

    def as_operator(self, module, method, parts, *inputs):
        return getattr(module, method)(*inputs)

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

    def add_parameter(self, module, name, shape, bound, like, device_mesh, placements):
        dtype = like.dtype if host.dtype_name(like) in ("float32", "float64") else ms.float32
        whole = initializer(Uniform(bound) if bound else "zeros", shape, dtype).init_data()
        sharding.add_parameter(module, name, whole, like, device_mesh, placements)

    def local(self, parameter):
        return parameter

    def is_sharded(self, parameter):
        return isinstance(parameter, sharding.ShardedParameter)

    def local_tokens(self, x, device_mesh, placement):
        return x, None

    def distributed_tokens(self, x, device_mesh, placement, shape):
        raise TypeError("MindSpore has no distributed tensor: leave use_local_output at True")

    # Dtypes and devices

    def dtype_name(self, value):
        return host.dtype_name(value)

    def is_floating(self, value):
        return host.dtype_name(value) in ("float16", "bfloat16", "float32", "float64")

    def same_device(self, x, weight):
        return True  # a process has one device

    def needs_gradient(self, x):
        return False  # nothing on a tensor says so

    # Integers

    def is_integer(self, tensor):
        return tensor.dtype in INTEGERS

    def on_host(self, tensor):
        return host.on_host(tensor)

    def to_host(self, *tensors):
        return host.to_host(*tensors)

    def int_tensor(self, values, like):
        return host.int_tensor(values)

    def int_tensors(self, arrays, like):
        return [host.int_tensor(values) for values in arrays]

    def made_by_host(self, tensor):
        return host.made_by_host(tensor)

    # Rows

    def permute(self, x, order_R, inverse_R, copies=1):
        return device.rows().permute(x, order_R, inverse_R, copies)

    def unpermute(self, x_RD, order_R, inverse_R, copies):
        return device.rows().unpermute(x_RD, order_R, inverse_R, copies)

    def index_select(self, x, index_R):
        return device.rows().index_select(x, index_R)

    def index_add(self, x, index_R, num_rows):
        return device.rows().index_add(x, index_R, num_rows)

    def concat(self, tensors, dim):
        return mint.cat(tensors, dim)

    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        experts = device.experts().swiglu_experts
        return experts(x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R)

    def grouped_linear(self, x_RD, w_END, num_tokens_per_expert_E):
        groups = row_groups(host.to_host(num_tokens_per_expert_E)[0])
        return device.experts().grouped_linear(x_RD, w_END.astype(x_RD.dtype), groups)

    def add_products(self, w, left_ENr, right_ErK, factor):
        delta = mint.bmm(left_ENr.astype(w.dtype), right_ErK.astype(w.dtype))
        return w + (factor * delta).reshape(w.shape)

    def same_dtype(self, x, weight):
        return x.dtype == weight.dtype

    def swiglu(self, gate, up):
        return device.experts().swiglu(gate, up)

    # Routing

    def probabilities(self, logits_TE, score_func):
        return device.routing().probabilities(logits_TE, score_func)

    def detach(self, x):
        return ops.stop_gradient(x)

    def top_indices(self, x_TE, k):
        return device.routing().top_indices(x_TE, k)

    def take_along(self, x_TE, index_TK):
        return device.routing().take_along(x_TE, index_TK)

    def multi_hot(self, index_TK, size):
        return device.routing().multi_hot(index_TK, size)

    def nonzero(self, x, num_nonzero):
        return device.routing().nonzero(x, num_nonzero)

    def floor_divide(self, x, divisor):
        return x // divisor

    def to_int(self, x):
        return x.astype(ms.int64)

    def sort_by_expert(self, selected_TK, num_experts):
        return device.routing().sort_by_expert(selected_TK, num_experts)

    def scale_rows(self, x_RD, scores_R):
        return device.rows().scale_rows(x_RD, scores_R)

    def count_in_backward(self, x, counter_E, counts_E):
        return device.routing().count_in_backward(x, counter_E, counts_E)

    def assign(self, buffer, value):
        buffer.set_data(value.astype(buffer.dtype))

    # Collectives

    def start_counts_exchange(self, counts, group, name, also=()):
        return collectives.CountsExchange(counts, group, name, also)

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
        return device.collectives().all_reduce(x, group, name)

    def rows_with_nan(self, x):
        return device.routing().rows_with_nan(x)

    def digests(self, x, group, name):
        return device.routing().digests(x, group, name)

    # Training

    def gradients(self):
        return gradients.VERBS
