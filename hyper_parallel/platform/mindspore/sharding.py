"""Parameters that hold a shard, and cells that compute with them.

MindSpore 2.10 has no distributed tensor; a ``ShardedParameter`` is one of the local shape that knows its layout.
"""

from mindspore import Parameter, Tensor, mint

from hyper_parallel.platform.mindspore import compat, device, initial
from hyper_parallel.platform.mindspore.rows import copied

__all__ = [
    "ShardedParameter",
    "add_parameter",
    "check_loading",
    "distribute",
    "shard_parameter",
    "wrap_construct",
    "pynative_only",
    "SHARDED",
]

SHARDED = "_hyper_parallel_sharded"


class ShardedParameter(Parameter, Tensor):
    """A parameter that is one shard of a tensor laid out over a mesh. Shape and values are the shard's.

    Attributes:
        device_mesh: the mesh. placements: one placement per mesh axis.
    """

    @staticmethod
    def of(local, name, requires_grad, device_mesh, placements):
        # MindSpore's word for "this rank's own": its gradient reducers leave such a parameter alone.
        parameter = Parameter(local, name=name, requires_grad=requires_grad, layerwise_parallel=True)
        # MindSpore builds a parameter's class at run time, so that it cannot be constructed as another one.
        parameter.__class__ = ShardedParameter
        parameter.device_mesh, parameter.placements = device_mesh, placements
        return parameter

    def to_local(self):
        """The shard: this parameter itself."""
        return self

    def full_tensor(self):
        """The whole tensor, gathered from all ranks of the mesh, every one of which must call this. No gradient."""
        whole = Tensor(self)
        # Later axes cut what earlier ones have left, so they are put together first.
        for axis in reversed(range(self.device_mesh.ndim)):
            if self.placements[axis].is_shard() and self.device_mesh.size(axis) > 1:
                group = self.device_mesh.get_group(axis)
                name = f"full_tensor: all-gather of {self.name}"
                shards = device.collectives().all_gather(whole, group, name)
                whole = mint.cat(shards, self.placements[axis].dim)
        return whole

    def set_data(self, data, slice_shape=False):
        """New values for this rank's shard, which keeps its shape.

        Raises:
            ValueError: data of another shape, such as the whole weight.
        """
        _check_shape(self, data)
        return super().set_data(data, slice_shape)

    def assign_value(self, value):
        """As :meth:`set_data`."""
        _check_shape(self, value)
        return super().assign_value(value)

    @property
    def main_grad(self):
        """Where MindSpore's ``DistributedDataParallel`` keeps a gradient; a shard refuses to get one."""
        raise AttributeError("a shard has no main_grad")

    @main_grad.setter
    def main_grad(self, value):
        raise TypeError(
            f"{self.name} is a shard: MindSpore's DistributedDataParallel would give it the values and gradients of "
            "other experts; leave it out and sum gradients with hyper_parallel.reduce_gradients"
        )

    def __deepcopy__(self, memo):
        copy = copied(Tensor(self))
        return ShardedParameter.of(copy, self.name, self.requires_grad, self.device_mesh, self.placements)


def _check_shape(shard, values):
    if tuple(values.shape) != tuple(shard.shape):
        raise ValueError(
            f"{shard.name} is a shard of shape {tuple(shard.shape)}, got values of shape {tuple(values.shape)}; load "
            "whole weights before the style is applied, or give this rank's part of them"
        )


def check_loading(net, parameters):
    """Raise ``ValueError`` before MindSpore loads ``parameters``, by name, of which one does not fit a shard."""
    for _, parameter in net.parameters_and_names():
        value = parameters.get(parameter.name)
        if isinstance(parameter, ShardedParameter) and isinstance(value, Tensor):
            _check_shape(parameter, value)


def distribute(tensor, device_mesh, placements, name="tensor", requires_grad=False):
    """This rank's part, as a ``ShardedParameter``, of the tensor that the mesh's first rank holds."""
    local = Tensor(tensor)
    for axis in range(device_mesh.ndim):
        if device_mesh.size(axis) > 1:
            source, group = device_mesh.axis_ranks(axis)[0], device_mesh.get_group(axis)
            what = f"distribute_tensor: broadcast of {name}"
            local = device.collectives().broadcast(local, source, group, what)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            size = local.shape[placement.dim] // device_mesh.size(axis)
            local = mint.narrow(local, placement.dim, device_mesh.get_local_rank(axis) * size, size)
    return ShardedParameter.of(copied(local), name, requires_grad, device_mesh, placements)


def shard_parameter(cell, name, device_mesh, placements):
    """Replace a parameter by its shard, under the name that optimizers and checkpoints know."""
    old = getattr(cell, name)
    if old.has_init and initial.drawn_by_element(old):
        local = initial.shard_of(old, device_mesh, placements)
        new = ShardedParameter.of(local, old.name, old.requires_grad, device_mesh, placements)
    else:
        whole = old.init_data() if old.has_init else old
        new = distribute(whole, device_mesh, placements, old.name, old.requires_grad)
    cell.insert_param_to_cell(name, new)
    new.name = old.name
    compat.replace_in_recompute(old, new)


def add_parameter(cell, name, whole, like, device_mesh, placements):
    """Give a cell one more trainable parameter, this rank's part of ``whole``, named as its parameter ``like`` is."""
    full_name = (like.name.rpartition(".")[0] + "." + name).lstrip(".")
    new = distribute(whole, device_mesh, placements, full_name, requires_grad=True)
    cell.insert_param_to_cell(name, new)
    compat.join_in_recompute(like, new)


def wrap_construct(cell, sharded):
    """Prepare a subclass of the cell's class whose construct is ``sharded``; see ``Platform.wrap_forward``."""
    original = type(cell)
    if SHARDED in vars(original):  # a class of its own again: copies of the cell share this one
        (original,) = original.__bases__

    def construct(self, *inputs, **keywords):
        pynative_only()
        return _run(self, original, inputs, keywords)

    body = {"construct": construct, SHARDED: sharded, "__module__": original.__module__, "__doc__": original.__doc__}
    wrapped = type(f"{sharded.label}{original.__name__}", (original,), body)

    def put_on():
        cell.__class__ = wrapped
        compat.renew_recompute(cell)

    return put_on


def _run(cell, original, inputs, keywords):
    def local_forward(*local_inputs, **local_keywords):
        return original.construct(cell, *local_inputs, **local_keywords)

    return getattr(type(cell), SHARDED)(cell, local_forward, *inputs, **keywords)


def pynative_only():
    """The first line of every construct of the library: says in words what MindSpore's compiler could not compile."""
    if compat.being_compiled():  # @jit.cond: True
        raise RuntimeError(
            "hyper_parallel runs in MindSpore's PyNative mode only, not in GRAPH_MODE or ms.jit: call "
            "mindspore.set_context(mode=mindspore.PYNATIVE_MODE), and leave the layer out of ms.jit or use "
            "ms.jit(..., capture_mode='bytecode')"
        )
