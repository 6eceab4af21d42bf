"""What checkpoints ask of torch: tensors as values, optimizer state by parameter name, random state, one gather."""

import base64
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop

from hyper_parallel.checkpoint.layout import Cut, local_pieces
from hyper_parallel.checkpoint.values import STORED_AS, Value, plain_name
from hyper_parallel.platform.operation import operation
from hyper_parallel.platform.torch import compat, packed

__all__ = [
    "NAME",
    "rank_and_size",
    "all_gather",
    "settle",
    "gathered",
    "model_layout",
    "model_values",
    "optimizer_values",
    "optimizer_state",
    "optimizer_to_load",
    "random_state",
    "set_random_state",
]

NAME = "torch"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# numpy has no such types: their bits go through integers of the same size.
AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
# Numbers of an optimizer, which also a parameter without dims has beside its moments.
NUMBERS = ("step", "mu_product", "mu", "eta")


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks, (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather(data: bytes, name: str) -> list[bytes]:
    """The data of every rank, in rank order."""
    rank, size = rank_and_size()
    if size == 1:
        return [data]
    device = compat.default_device()
    with operation(name, range(size), rank):
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([len(data)], device=device))
        longest = int(max(length.item() for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
        dist.all_gather(gathered, padded.to(device))
    return [part.cpu().numpy()[: int(length)].tobytes() for part, length in zip(gathered, lengths)]


def _value(name, tensor):
    """A tensor, plain or a DTensor, as a checkpoint sees it."""
    shape, cuts, mesh_shape, coordinate = tuple(tensor.shape), (), (), ()
    if isinstance(tensor, dt.DTensor):
        cuts = tuple(_cut(name, placement, len(shape)) for placement in tensor.placements)
        mesh_shape, coordinate = tensor.device_mesh.shape, tensor.device_mesh.get_coordinate()
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, which the format of checkpoints does not have")
    local_shape, pieces = (0,) * len(shape), ()
    if coordinate is not None:
        local_shape, pieces = local_pieces(shape, cuts, mesh_shape, coordinate)
    if local_shape != tuple(_local(tensor).shape):
        raise ValueError(
            f"{name} {shape} with placements {tensor.placements} should be {local_shape} on this rank, but is "
            f"{tuple(_local(tensor).shape)}; checkpoints know Shard, Replicate and FSDP2's strided shards"
        )
    return Value(
        DTYPES[tensor.dtype], shape, local_shape, tuple(pieces), partial(_read, tensor), partial(_write, tensor)
    )


def _cut(name, placement, ndim):
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return Cut(placement.dim % ndim)
    if kind == "_StridedShard":
        return Cut(placement.dim % ndim, placement.split_factor)
    raise ValueError(
        f"{name} has the placement {placement!r}; a checkpoint takes Shard and Replicate: redistribute it first"
    )


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, dt.DTensor) else tensor


def _read(tensor):
    local = _local(tensor.detach()).cpu().contiguous()
    return local.view(AS_INTEGERS.get(local.dtype, local.dtype)).numpy().view(STORED_AS[DTYPES[tensor.dtype]])


def _write(tensor, array):
    kind = AS_INTEGERS.get(tensor.dtype)
    source = torch.from_numpy(array.view("<i2") if kind == torch.int16 else array)
    with torch.no_grad():
        _local(tensor).copy_(source if kind is None else source.view(tensor.dtype))


def settle(module) -> None:
    """Bring every parameter to where it lies between two steps."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # after a forward without backward its parameters may lie here whole


def gathered(parameter) -> tuple[str, np.ndarray]:
    """Dtype and values of a whole parameter, as a checkpoint would hold them, on every rank of its mesh, all of which
    call this."""
    whole = parameter.full_tensor() if isinstance(parameter, dt.DTensor) else parameter
    return DTYPES[whole.dtype], _read(whole)


def _parameters(module):
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def _packed(module):
    """By name, the dim in which a packed weight tells gate from up: checkpoints hold Hugging Face's shape."""
    return {plain_name(name): pair for name, pair in packed.pairs(module).items()}


def _outside(tensor, pair):
    return tensor if pair is None else packed.PackedDTensor.of(tensor.detach(), pair)


def model_values(module) -> dict[str, Value]:
    """Parameters and persistent buffers by name; one that has several names has its first.

    Raises:
        ValueError: a placement, dtype or state that checkpoints do not know, named.
    """
    values = model_layout(module)
    on_meta = [name for name, tensor in _model_tensors(module).items() if tensor.is_meta]
    if on_meta:
        raise ValueError(f"{', '.join(on_meta)} are on the meta device; call module.to_empty(device=...) first")
    return values


def model_layout(module) -> dict[str, Value]:
    """The same of a module that may be on the meta device: its dtypes, shapes and pieces, not to be read or written."""
    pairs = _packed(module)
    return {name: _value(name, _outside(tensor, pairs.get(name))) for name, tensor in _model_tensors(module).items()}


def _model_tensors(module):
    tensors = {}
    settle(module)
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{path or 'the module'} has extra state (get_extra_state), which a checkpoint cannot hold"
            )
    tensors.update(_parameters(module))
    seen = set()
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                tensors[plain_name(f"{path}.{name}" if path else name)] = buffer
    return tensors


def _optimized(module, optimizer):
    """(name, parameter, group) of everything that the optimizer moves."""
    names = {id(parameter): name for name, parameter in _parameters(module).items()}
    found = [(names.get(id(p)), p, group) for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(name is None for name, _, _ in found)
    if strangers:
        raise ValueError(
            f"the optimizer has {strangers} parameters that are not the module's; make it after the module was "
            "sharded, of module.parameters()"
        )
    return found


def _tensors(state, parameter):
    """The entries of a parameter's state that lie as it does."""
    return {key: value for key, value in _entries(state, parameter) if not _is_number(key, value, parameter)}


def _numbers(state, parameter):
    """The other entries, such as the step."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in _entries(state, parameter)
        if _is_number(key, value, parameter)
    }


def _entries(state, parameter):
    return [(key, value) for key, value in state.get(parameter, {}).items() if value is not None]


def _is_number(key, value, parameter):
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and (parameter.dim() > 0 or key in NUMBERS))


def optimizer_values(module, optimizer) -> dict[str, Value]:
    """The optimizer's tensors, such as "exp_avg.NAME"; each lies as its parameter does.

    Raises:
        ValueError: parameters that are not the module's, or state of another shape than its parameter's.
    """
    values, pairs = {}, _packed(module)
    for name, parameter, _ in _optimized(module, optimizer):
        for key, tensor in _tensors(optimizer.state, parameter).items():
            values[f"{key}.{name}"] = _state_value(f"{key}.{name}", tensor, parameter, pairs.get(name))
    return values


def _state_value(name, tensor, parameter, pair):
    both = isinstance(tensor, dt.DTensor), isinstance(parameter, dt.DTensor)
    if tuple(tensor.shape) != tuple(parameter.shape) or both[0] != both[1]:
        raise ValueError(
            f"optimizer state {name} has shape {tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}; only "
            "state that lies as its parameter does can be saved"
        )
    return _value(name, _outside(tensor, pair))


def optimizer_state(module, optimizer) -> dict:
    """The optimizer's class, and its numbers per parameter, such as its step."""
    scalars: dict[str, dict] = {}
    for name, parameter, _ in _optimized(module, optimizer):
        for key, value in _numbers(optimizer.state, parameter).items():
            scalars.setdefault(key, {})[name] = value
    return {"class": type(optimizer).__name__, "scalars": scalars}


def optimizer_to_load(module, optimizer, saved: dict, saved_state: dict):
    """The values that the optimizer needs, and a function that hands them to it once they are filled.

    A parameter of which nothing is saved has not been stepped: its state becomes empty, as a new optimizer's is.
    """
    values, states, pairs = {}, {}, _packed(module)
    for name, parameter, group in _optimized(module, optimizer):
        keys = _keys(optimizer, group, saved, saved_state, name)
        if not any(f"{key}.{name}" in saved for key in keys):
            states[parameter] = {}
            continue
        state = states[parameter] = {}
        for key in keys:
            tensor = optimizer.state.get(parameter, {}).get(key)
            if tensor is None:
                tensor = torch.zeros_like(parameter, requires_grad=False, dtype=_saved_dtype(saved, f"{key}.{name}"))
            state[key] = tensor
            values[f"{key}.{name}"] = _state_value(f"{key}.{name}", tensor, parameter, pairs.get(name))
        for key, by_name in saved_state["scalars"].items():
            if name in by_name:
                on_device = group.get("capturable") or group.get("fused")
                device = parameter.device if on_device else "cpu"
                state[key] = torch.tensor(float(by_name[name]), dtype=torch.float32, device=device)

    def commit():
        for parameter, state in states.items():
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state

    return values, commit


def _saved_dtype(saved, name):
    return {text: dtype for dtype, text in DTYPES.items()}[saved[name]["dtype"]] if name in saved else None


def _keys(optimizer, group, saved, saved_state, name):
    """The kinds of tensor that this optimizer keeps for a parameter."""
    if isinstance(optimizer, (Adam, AdamW, RAdam, NAdam)):
        return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
    if isinstance(optimizer, SGD):
        return ["momentum_buffer"] * bool(group["momentum"])
    if isinstance(optimizer, RMSprop):
        return ["square_avg"] + ["momentum_buffer"] * (group["momentum"] > 0) + ["grad_avg"] * bool(group["centered"])
    if isinstance(optimizer, Adagrad):
        return ["sum"]
    if saved_state["class"] != type(optimizer).__name__:
        raise ValueError(
            f"the checkpoint holds the state of {saved_state['class']}, and what {type(optimizer).__name__} needs is "
            "not known here; use the same optimizer"
        )
    return [
        key.removesuffix(f".{name}") for key in saved if key.endswith(f".{name}") and "." not in key[: -len(name) - 1]
    ]


def random_state() -> str:
    """The states of the CPU's generator and of the accelerator's, as text."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state())
    return " ".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def set_random_state(text: str) -> None:
    """Undo ``random_state``."""
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split()]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(states[1])
