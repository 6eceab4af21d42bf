"""What users put on and around the experts of a MoE layer: hooks, recomputation, and torch's FSDP2."""

import copy

import numpy as np

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.distributed import variant_cases
from tests.harness import oracle
from tests.harness.setting import coordinates, whole_mesh


def hooks(context, **arguments):
    """Errors against one device, and how often hooks before, after and backward of the experts ran."""
    calls = {"before": 0, "after": 0, "backward": 0}

    def counting(name):
        def hook(*_):
            calls[name] += 1

        return hook

    def register(context, layer):
        experts = layer.experts
        experts.register_forward_pre_hook(counting("before"))
        experts.register_forward_hook(counting("after"))
        if context.platform == "torch":
            experts.register_full_backward_hook(counting("backward"))
        else:
            experts.register_backward_hook(counting("backward"))

    return variant_cases.against_one_device(context, around=register, **arguments), calls


def scaling_hook(context, **arguments):
    """The same with a hook that doubles what the experts give: another result, if hooks work."""

    def register(context, layer):
        layer.experts.register_forward_hook(lambda module, inputs, output: output * 2)

    return variant_cases.against_one_device(context, around=register, **arguments)


def recomputed(context, how, **arguments):
    """The experts alone under recomputation: torch's, by a call ("function") or a wrapper; MindSpore's own."""

    def recompute(context, layer):
        if context.platform == "mindspore":
            layer.experts.recompute()
            return
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

        kind = CheckpointImpl.REENTRANT if how == "reentrant" else CheckpointImpl.NO_REENTRANT
        layer.experts = checkpoint_wrapper(layer.experts, checkpoint_impl=kind)

    return variant_cases.against_one_device(context, around=recompute, **arguments)


def fsdp_over_dp(context, style, dp, ep, tp, reshard):
    """Errors of a layer whose experts are cut by FSDP2 over dp too, all dp ranks with the same tokens."""
    from torch.distributed.fsdp import fully_shard

    one = variant_cases.make_layer(context, 2)
    layer = copy.deepcopy(one)
    mesh = whole_mesh("torch", context.world_size, ep, tp)
    getattr(hp, style)().apply(layer.experts, mesh["ep", "tp"])
    fully_shard(layer.experts, mesh=mesh["dp"], reshard_after_forward=reshard)
    dp_rank, (ep_rank, tp_rank) = mesh.get_local_rank("dp"), coordinates(context, ep, tp)
    batches = [variant_cases.tokens_for(rank, 8) for rank in range(ep)]
    found = variant_cases.evaluate(context, layer, batches[ep_rank])
    whole = variant_cases.evaluate(context, one, np.concatenate(batches))
    mine = slice(8 * ep_rank, 8 * ep_rank + 8)
    errors = {
        "output": (found.output, whole.output[mine]),
        "x": (found.input_gradients[0], whole.input_gradients[0][mine]),
    }
    for name in ("experts.w1", "experts.w2", "experts.w3"):
        expected = variant_cases.part(whole.parameter_gradients[name], name, ep, tp, ep_rank, tp_rank)
        errors[name] = found.parameter_gradients[name], np.split(expected, dp, 0)[dp_rank]
    return {name: oracle.relative_error(*pair) for name, pair in errors.items()}


def all_to_alls(context, saved, style="ExpertTensorParallel"):
    """All-to-alls of a step of a layer that is recomputed whole (``saved`` None: not at all), and all gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            Counting.number += "all_to_all" in str(function) or "alltoall" in str(function)
            return function(*arguments, **(keywords or {}))

    def contexts():
        def policy(context, operator, *arguments, **keywords):
            kept = operator in (hp.ops_to_save if saved else ())
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    layer = variant_cases.make_layer(context, 2)
    mesh = whole_mesh("torch", context.world_size, 2, 2)
    getattr(hp, style)().apply(layer.experts, mesh["ep", "tp"])
    x = context.framework.tensor(variant_cases.tokens_for(mesh.get_local_rank("ep"), 8)).requires_grad_()
    with Counting():
        y = layer(x) if saved is None else checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    gradients = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    return Counting.number, [context.framework.array(gradient) for gradient in gradients]


def integers_of_the_host(context):
    """Copies from a device that reading costs: of an int_tensor, and of a tensor that came from elsewhere."""
    from unittest import mock

    hp.set_platform(context.platform)
    platform, adapter, copies = get_platform(), context.framework, []
    made = platform.int_tensor([3, 1, 2], like=adapter.tensor([1.0]))
    several = platform.int_tensors([np.array([4, 5]), np.array([6])], like=adapter.tensor([1.0]))
    other = adapter.int_tensor([7, 8])
    owner, name = (type(other), "asnumpy") if context.platform == "mindspore" else (type(other), "cpu")
    original = getattr(owner, name)

    def counting(self, *arguments, **keywords):
        copies.append(tuple(self.shape))
        return original(self, *arguments, **keywords)

    with mock.patch.object(owner, name, counting):
        known = platform.to_host(made, *several)
        free = len(copies)
        mixed = platform.to_host(other, made)
    return known, free, mixed, copies, [platform.made_by_host(value) for value in (made, *several, other)]
