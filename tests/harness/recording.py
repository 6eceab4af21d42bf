"""Recording every collective that the frameworks themselves are asked for, with the ranks of its group."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from hyper_parallel.core.expert_parallel.exchange import DedupExchange, RowsExchange, SplitExchange
from hyper_parallel.core.expert_parallel.expert_parallel import ExpertParallel

TORCH = (
    "all_reduce",
    "all_gather",
    "all_to_all_single",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "gather",
    "reduce",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
)
MINDSPORE = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "all_to_all",
    "all_to_all_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "send",
    "recv",
)
STEPS = ("dispatch", "combine")
TORCH_COMPAT = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
MINDSPORE_PRIMITIVES = ("dist_comm_isend_op", "dist_comm_irecv_op")


@dataclass(frozen=True)
class Collective:
    """``step`` is what was running: "dispatch" or "combine", of bare experts or of a MoE layer, or "" outside.
    ``payload`` and ``shape`` are bytes and shape of the tensor that is sent; 0 and () where the verb takes none."""

    verb: str
    ranks: tuple
    step: str
    payload: int = 0
    shape: tuple = ()


@contextmanager
def recorded(context):
    """Yield the growing list of collectives issued on this rank inside the block, point-to-point ones included."""
    calls, step = [], [""]
    with ExitStack() as stack:
        for owner, verb, ranks_of in _targets(context.platform):
            recording = _recording(getattr(owner, verb), verb, ranks_of, calls, step)
            stack.enter_context(mock.patch.object(owner, verb, recording))
        for owner in (RowsExchange, DedupExchange, SplitExchange):
            for method in STEPS:
                stack.enter_context(mock.patch.object(owner, method, _during(getattr(owner, method), method, step)))
        for method in STEPS:
            name = f"_token_{method}"
            recording = _during(getattr(ExpertParallel, name), method, step)
            stack.enter_context(mock.patch.object(ExpertParallel, name, recording))
        yield calls


def _recording(original, verb, ranks_of, calls, step):
    def call(*args, **kwargs):
        calls.append(Collective(verb, tuple(ranks_of(args, kwargs)), step[0], *_sent(verb, args)))
        return original(*args, **kwargs)

    return call


def _sent(verb, args):
    """Bytes and shape of the tensor that a call sends; of two tensors the first is what arrives."""
    tensors = [arg for arg in args if hasattr(arg, "shape")]
    if not tensors:
        return 0, ()
    x = tensors[-1] if verb in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor") else tensors[0]
    size = x.nbytes() if callable(x.nbytes) else x.nbytes
    return size, tuple(x.shape)


def _during(original, method, step):
    def call(*args, **kwargs):
        step[0] = method
        try:
            return original(*args, **kwargs)
        finally:
            step[0] = ""

    return call


def _targets(platform):
    if platform == "torch":
        import torch.distributed as dist

        from hyper_parallel.platform.torch import compat

        def of_group(args, kwargs):
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            return dist.get_process_group_ranks(groups[0] if groups else None)

        return [(dist, verb, of_group) for verb in TORCH] + [(compat, verb, of_group) for verb in TORCH_COMPAT]
    import mindspore.communication as comm
    from mindspore.mint import distributed as dist

    from hyper_parallel.platform.mindspore import cpu_collectives

    def by_name(args, kwargs):
        return comm.get_process_group_ranks(kwargs["group"])

    def by_position(args, kwargs):  # isend(x, peer, group, tag), irecv(x, tag, peer, group)
        return comm.get_process_group_ranks(next(arg for arg in args if isinstance(arg, str)))

    targets = [(dist, verb, by_name) for verb in MINDSPORE if hasattr(dist, verb)]
    return targets + [(cpu_collectives, verb, by_position) for verb in MINDSPORE_PRIMITIVES]
