"""What checkpoints ask of MindSpore: parameters as values under the names that torch has for them, optimizer state by
parameter name, random state, one gather."""

import base64
from functools import partial

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import ParameterTuple, Tensor, nn

from hyper_parallel.checkpoint.layout import Cut, local_pieces
from hyper_parallel.checkpoint.values import STORED_AS, Value
from hyper_parallel.platform.mindspore import compat, device
from hyper_parallel.platform.mindspore.sharding import ShardedParameter

__all__ = [
    "NAME",
    "rank_and_size",
    "all_gather",
    "settle",
    "gathered",
    "model_values",
    "optimizer_values",
    "optimizer_state",
    "optimizer_to_load",
    "random_state",
    "set_random_state",
]

NAME = "mindspore"
DTYPES = {
    ms.float64: "F64",
    ms.float32: "F32",
    ms.float16: "F16",
    ms.bfloat16: "BF16",
    ms.int64: "I64",
    ms.int32: "I32",
    ms.int16: "I16",
    ms.int8: "I8",
    ms.uint8: "U8",
    ms.bool_: "BOOL",
}
# MindSpore's own names for what torch calls otherwise.
SCALE = {"gamma": "weight", "beta": "bias"}
BATCH = {**SCALE, "moving_mean": "running_mean", "moving_variance": "running_var"}
NAMES = {
    nn.LayerNorm: SCALE,
    nn.GroupNorm: SCALE,
    nn.BatchNorm1d: BATCH,
    nn.BatchNorm2d: BATCH,
    nn.BatchNorm3d: BATCH,
    nn.Embedding: {"embedding_table": "weight"},
}
# Tuples of an optimizer that hold one tensor per parameter, by torch's names.
MOMENTS = {
    "exp_avg": ("exp_avg", "moment1", "moments1"),
    "exp_avg_sq": ("exp_avg_sq", "moment2", "moments2"),
    "max_exp_avg_sq": ("max_exp_avg_sq", "vhat"),
    "momentum_buffer": ("moments",),
}
NOT_STATE = ("parameters", "_parameters", "params")


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks, (0, 1) where communication is not initialised."""
    return (comm.get_rank(), comm.get_group_size()) if compat.communication_is_initialised() else (0, 1)


def all_gather(data: bytes, name: str) -> list[bytes]:
    """The data of every rank, in rank order."""
    _, size = rank_and_size()
    if size == 1:
        return [data]
    group = comm.GlobalComm.WORLD_COMM_GROUP
    gather = device.collectives().all_gather
    lengths = [int(part.asnumpy()[0]) for part in gather(Tensor([len(data)], ms.int32), group, name)]
    # As integers of 4 bytes, which every backend gathers.
    padded = np.frombuffer(data.ljust(-(-max(lengths) // 4) * 4, b"\0"), np.int32)
    gathered = gather(Tensor(padded.copy()), group, name)
    return [part.asnumpy().tobytes()[:length] for part, length in zip(gathered, lengths)]


def _value(name, parameter, laid_out):
    """A parameter as a checkpoint sees it, laid out as ``laid_out`` is."""
    local = tuple(parameter.shape)
    shape, cuts, mesh_shape, coordinate = local, (), (), ()
    if isinstance(laid_out, ShardedParameter):
        mesh = laid_out.device_mesh
        cuts = tuple(Cut(p.dim) if p.is_shard() else None for p in laid_out.placements)
        mesh_shape, coordinate = mesh.shape, mesh.get_coordinate()
        whole = list(local)
        for cut, size in zip(cuts, mesh_shape):
            if cut is not None:
                whole[cut.dim] *= size
        shape = tuple(whole)
    if parameter.dtype not in DTYPES:
        raise ValueError(f"{name} is {parameter.dtype}, which the format of checkpoints does not have")
    _, pieces = local_pieces(shape, cuts, mesh_shape, coordinate)
    read, write = partial(_read, parameter), partial(_write, parameter)
    return Value(DTYPES[parameter.dtype], shape, local, tuple(pieces), read, write)


def settle(module) -> None:
    """Bring every parameter to where it lies between two steps: here it never leaves it."""


def gathered(parameter) -> tuple[str, np.ndarray]:
    """Dtype and values of a whole parameter, as a checkpoint would hold them, on every rank of its mesh, all of which
    call this."""
    whole = parameter.full_tensor() if isinstance(parameter, ShardedParameter) else parameter
    dtype = DTYPES[whole.dtype]
    return dtype, whole.asnumpy().view(STORED_AS[dtype])


def _read(parameter):
    if parameter.has_init:
        parameter.init_data()
    return parameter.asnumpy().view(STORED_AS[DTYPES[parameter.dtype]])


def _write(parameter, array):
    if parameter.has_init:
        parameter.init_data()
    if parameter.dtype == ms.bfloat16:
        # The upper half of a float32 is a bfloat16, so this cast is exact.
        values = Tensor((array.astype(np.uint32) << 16).view(np.float32)).astype(ms.bfloat16)
    else:
        values = Tensor(array, parameter.dtype)
    parameter.set_data(values)


def _parameters(module):
    """Everything that belongs in a checkpoint, by torch's names; a parameter that has several names has its first."""
    from hyper_parallel.platform.mindspore.modules import MoE

    found, seen = {}, set()
    for path, cell in module.cells_and_names():
        names = next((NAMES[kind] for kind in NAMES if isinstance(cell, kind)), {})
        for name, parameter in compat.parameters_of(cell).items():
            counter = isinstance(cell, MoE) and name == "tokens_per_expert"  # what torch calls not persistent
            if parameter is not None and id(parameter) not in seen and not counter:
                seen.add(id(parameter))
                name = names.get(name, name)
                found[f"{path}.{name}" if path else name] = parameter
    return found


def model_values(module) -> dict[str, Value]:
    """Parameters by name, trainable or not.

    Raises:
        ValueError: a dtype that checkpoints do not know, named.
    """
    return {name: _value(name, parameter, parameter) for name, parameter in _parameters(module).items()}


def _optimized(module, optimizer):
    """(name, parameter) of everything that the optimizer moves, in its order."""
    names = {id(parameter): name for name, parameter in _parameters(module).items()}
    found = [(names.get(id(parameter)), parameter) for parameter in optimizer.parameters]
    strangers = sum(name is None for name, _ in found)
    if strangers:
        raise ValueError(
            f"the optimizer has {strangers} parameters that are not the module's; make it after the module was "
            "sharded, of module.trainable_params()"
        )
    return found


def optimizer_values(module, optimizer) -> dict[str, Value]:
    """The optimizer's moments under torch's names, such as "exp_avg.NAME"; each lies as its parameter does.

    Raises:
        ValueError: parameters that are not the module's, or an optimizer with state that is not known here.
    """
    kinds = {attribute: kind for kind, attributes in MOMENTS.items() for attribute in attributes}
    values = {}
    for attribute, tensors in vars(optimizer).items():
        if not isinstance(tensors, ParameterTuple) or attribute in NOT_STATE or len(tensors) == 0:
            continue
        if attribute not in kinds:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {attribute!r}, which checkpoints do not know; they know the "
                "state of Adam, AdamW, AdamWeightDecay and Momentum"
            )
        if kinds[attribute] == "max_exp_avg_sq" and not _amsgrad(optimizer):
            continue
        for (name, parameter), tensor in zip(_optimized(module, optimizer), tensors, strict=True):
            key = f"{kinds[attribute]}.{name}"
            if tuple(tensor.shape) != tuple(parameter.shape):
                raise ValueError(f"optimizer state {key} has shape {tensor.shape}, its parameter {parameter.shape}")
            values[key] = _value(key, tensor, parameter)
    return values


def _amsgrad(optimizer):
    groups = getattr(optimizer, "param_groups", [])
    return any(group.get("amsgrad") for group in groups if isinstance(group, dict)) or hasattr(optimizer, "vhat")


def _step_of(optimizer):
    return optimizer.state_step if hasattr(optimizer, "state_step") else optimizer.global_step


def optimizer_state(module, optimizer) -> dict:
    """The optimizer's class, and its step, which is one for all parameters."""
    step = float(_step_of(optimizer).asnumpy().reshape(-1)[0])
    scalars = {"step": {name: step for name, _ in _optimized(module, optimizer)}}
    for power in ("beta1_power", "beta2_power"):
        if hasattr(optimizer, power):
            scalars[power] = {"": float(getattr(optimizer, power).asnumpy().reshape(-1)[0])}
    return {"class": type(optimizer).__name__, "scalars": scalars}


def optimizer_to_load(module, optimizer, saved: dict, saved_state: dict):
    """The values that the optimizer needs, and a function to be called once they are filled.

    A parameter of which nothing is saved has not been stepped: its moments become zero, as a new optimizer's are.
    """
    values, unstepped = {}, []
    stepped = {name for name, _ in _optimized(module, optimizer) for kind in MOMENTS if f"{kind}.{name}" in saved}
    for key, value in optimizer_values(module, optimizer).items():
        (values.__setitem__(key, value) if key.partition(".")[2] in stepped else unstepped.append(value))
    steps = set(saved_state["scalars"].get("step", {}).values())
    if len(steps) > 1:
        raise ValueError(
            f"the checkpoint's parameters have made different numbers of steps ({sorted(steps)}), and MindSpore's "
            "optimizers count for all together; load without optimizer"
        )

    def commit():
        for value in unstepped:
            value.write(np.zeros(value.local_shape, STORED_AS[value.dtype]))
        if steps:
            _set_step(optimizer, steps.pop(), saved_state["scalars"])

    return values, commit


def _set_step(optimizer, step, scalars):
    counter = _step_of(optimizer)
    counter.set_data(Tensor(np.full(counter.shape, step), counter.dtype))
    for power, beta in (("beta1_power", "beta1"), ("beta2_power", "beta2")):
        if hasattr(optimizer, power):
            # Saved, it has the rounding of every step; from another framework it has to be computed.
            value = scalars[power][""] if power in scalars else float(getattr(optimizer, beta)) ** step
            parameter = getattr(optimizer, power)
            parameter.set_data(Tensor(np.full(parameter.shape, value), parameter.dtype))


def random_state() -> str:
    """The state of the default generator, as text."""
    return base64.b64encode(ms.get_rng_state().asnumpy().tobytes()).decode()


def set_random_state(text: str) -> None:
    """Undo ``random_state``."""
    ms.set_rng_state(Tensor(np.frombuffer(base64.b64decode(text), np.uint8).copy()))
