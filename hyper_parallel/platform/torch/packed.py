"""Hugging Face's experts on torch: their weights as DTensors, their own forward on local parts, their state dict.

Shape suffixes: R rows, E experts, L experts of this rank, H hidden size, D model size.
"""

import torch
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hyper_parallel.core.expert_parallel.experts import grouped_experts
from hyper_parallel.core.expert_parallel.packed import PackedShapes
from hyper_parallel.platform.torch import compat, sharding

__all__ = ["PackedDTensor", "pairs", "shard", "wrap"]

# What such a module calls its sizes; its forward must find those of its part.
SIZES = {
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "intermediate_dim": "hidden_dim",
    "intermediate_size": "hidden_dim",
}


def shard(module, shapes, device_mesh, placements):
    """Replace every parameter by a DTensor in the shape in which it is cut."""
    for name, cut in shapes.cuts.items():
        old = getattr(module, name)
        new = nn.Parameter(old.detach().reshape(cut.laid_out), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        module.register_parameter(name, new)
        sharding.shard_parameter(module, name, device_mesh, placements[name])


def wrap(module, sharded):
    """See ``Platform.wrap_forward``; ``local_forward`` is called with the rows of this rank's experts."""
    return sharding.wrap_forward(module, sharded, call=_local_experts, mixins=(BorderStateDict,))


def pairs(module):
    """By the dotted name of each packed parameter in the module, the dim of its layout that tells gate from up."""
    found = {}
    for path, child in module.named_modules():
        shapes = getattr(sharding.sharded_of(child), "shapes", None)
        cuts = shapes.cuts if isinstance(shapes, PackedShapes) else {}
        found |= {f"{path}.{name}".lstrip("."): cut.pair for name, cut in cuts.items() if cut.pair is not None}
    return found


def _local_experts(module, original, inputs, keywords):
    """``(rows_RD, counts_L, scores_R)`` -> the experts' scored output rows, or this rank's terms of their sum."""
    sharded, (rows_RD, counts_L, scores_R) = sharding.sharded_of(module), inputs
    twin = sharding.local_twin(module, original)
    sharding.adapt(twin, sharded)
    parameters = vars(twin)["_parameters"]
    if sharded.shapes.swiglu:
        gate_LHD, up_LHD = parameters["gate_up_proj"].unbind(1)
        weights = gate_LHD, parameters["down_proj"], up_LHD
        return grouped_experts(sharded.platform, *weights, rows_RD, counts_L, scores_R)
    if not len(rows_RD):
        return Nothing.apply(rows_RD, scores_R, *parameters.values())
    _as_own(twin, sharded)
    num_local = len(parameters["down_proj"])
    ids_R = torch.repeat_interleave(torch.arange(num_local, device=rows_RD.device), counts_L, output_size=len(rows_RD))
    return original.forward(twin, rows_RD, ids_R[:, None], scores_R[:, None]).to(rows_RD.dtype)


def _as_own(twin, sharded):
    """Let the module's own forward find the shapes and sizes that it knows, those of this rank's part."""
    shapes, parameters = sharded.shapes, vars(twin)["_parameters"]
    for name, cut in shapes.cuts.items():
        if cut.pair is not None:
            parameters[name] = parameters[name].flatten(cut.pair, cut.pair + 1)
    hidden_dim = shapes.hidden_dim // (1 if sharded.tp_mesh is None else sharded.tp_mesh.size())
    local = {"num_experts": len(parameters["down_proj"]), "hidden_dim": hidden_dim}
    for name, size in SIZES.items():
        if vars(twin).get(name) == getattr(shapes, size):
            setattr(twin, name, local[size])
    if "down_proj_bias" in parameters and sharded.tp_group is not None:
        first = sharded.tp_mesh.get_local_rank() == 0
        parameters["down_proj_bias"] = OnOneRank.apply(parameters["down_proj_bias"], first)


class Nothing(torch.autograd.Function):
    """The output for no rows. The other ranks' backward waits for this rank's, so it must be part of the graph."""

    @staticmethod
    def forward(ctx, rows_RD, *others):
        ctx.save_for_backward(*others)
        return rows_RD.clone()

    @staticmethod
    def backward(ctx, grad):
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        return grad, *(torch.zeros_like(other) if needs else None for other, needs in needed)


class OnOneRank(torch.autograd.Function):
    """A bias that every tp rank holds, whose term must enter the sum over tp once. Its gradient is whole on all."""

    @staticmethod
    def forward(ctx, bias, first):
        return bias.clone() if first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class BorderStateDict:
    """State dicts with Hugging Face's shapes: ``[E, 2H, D]``, whatever the weights are laid out as."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, cut in sharding.sharded_of(self).shapes.cuts.items():
            value = destination[prefix + name]
            if cut.pair is not None and isinstance(value, dt.DTensor):
                destination[prefix + name] = PackedDTensor.of(value.detach(), cut.pair)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name, cut in sharding.sharded_of(self).shapes.cuts.items():
            value = state_dict.get(prefix + name)
            if value is not None and tuple(value.shape) == cut.shape:
                state_dict[prefix + name] = _laid_out(value, cut, self._parameters[name])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _laid_out(value, cut, like):
    """A value of the border as a DTensor like the parameter ``like``; plain tensors are whole on every rank."""
    if isinstance(value, PackedDTensor) and value.laid_out.placements == like.placements:
        return value.laid_out
    if isinstance(value, dt.DTensor):
        if cut.pair is None:
            return value
        value = value.full_tensor()
    whole = value.detach().reshape(cut.laid_out)
    sizes, offsets = compat.local_shape_and_offsets(whole.shape, like.device_mesh, like.placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        whole = whole.narrow(dim, offset, size)
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return dt.DTensor.from_local(whole, like.device_mesh, like.placements, **layout)


class PackedDTensor(dt.DTensor):
    """A packed weight as checkpoints see it: ``[E, 2H, D]``, of which this rank holds a part of gate and one of up.

    It shares memory with the parameter. torch.distributed.checkpoint writes and reads the two parts as two pieces.

    Attributes:
        laid_out: the same numbers in the shape in which they are cut. pair: its dim that tells gate from up.
    """

    @staticmethod
    def of(laid_out, pair):
        """Join the dims ``pair`` and the one after it."""
        shape = (*laid_out.shape[:pair], 2 * laid_out.shape[pair + 1], *laid_out.shape[pair + 2 :])
        placements = tuple(_joined(placement, pair) for placement in laid_out.placements)
        local = laid_out.to_local()
        local = local.view(*local.shape[:pair], -1, *local.shape[pair + 2 :])
        stride = torch.empty(shape, device="meta").stride()
        joined = dt.DTensor.from_local(
            local, laid_out.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )
        packed = compat.as_dtensor_class(PackedDTensor, joined)
        packed.laid_out, packed.pair = laid_out, pair
        return packed

    def full_tensor(self, **arguments):
        """The whole weight ``[E, 2H, D]`` on every rank of the mesh."""
        return self.laid_out.full_tensor(**arguments).flatten(self.pair, self.pair + 1)

    def __create_chunk_list__(self):
        mesh, placements = self.laid_out.device_mesh, self.laid_out.placements
        sizes, offsets = map(list, compat.local_shape_and_offsets(self.laid_out.shape, mesh, placements))
        del sizes[self.pair], offsets[self.pair]
        hidden_dim, first = self.laid_out.shape[self.pair + 1], offsets[self.pair]
        chunks = []
        for start in (first, hidden_dim + first):
            offsets[self.pair] = start
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return chunks

    def __create_write_items__(self, fqn, _):
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        offsets = [chunk.offsets for chunk in self.__create_chunk_list__()]
        return self.laid_out.to_local().select(self.pair, offsets.index(index.offset))


def _joined(placement, pair):
    """A placement of the laid-out weight as one of the joined weight."""
    if not isinstance(placement, (dt.Shard, compat.StridedShard)) or placement.dim < pair:
        return placement
    if placement.dim == pair + 1:
        return compat.StridedShard(pair, split_factor=2)
    return dt.Shard(placement.dim - 1)
