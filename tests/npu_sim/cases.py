"""Cases that run on every simulated rank."""

import copy
import functools
import os
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.platform.torch import npu_experts
from tests.distributed import expert_cases, variant_cases
from tests.harness import oracle, parity
from tests.harness.setting import coordinates, local_part, make_experts, mesh_for


def in_dtype(context, dtype):
    """The same rank with another float type for tensors and parameters."""
    adapter = copy.copy(context.framework)
    adapter.dtype = dtype
    return replace(context, framework=adapter)


def errors(context, dtype, misorder_experts=False, **arguments):
    """Relative errors of one rank against float64 on one device; see `parity.errors`. On request npu_grouped_matmul is
    given the counts of other experts."""
    original = npu_experts._grouped_matmul

    def misordered(left, right, counts_E, **options):
        return original(left, right, counts_E.roll(1), **options)

    with mock.patch.object(npu_experts, "_grouped_matmul", misordered if misorder_experts else original):
        return parity.errors(in_dtype(context, dtype), **arguments)


def errors_of_one_device(context, dtype, ep, tp, problem):
    """What the dtype alone costs: the errors of this rank's rows and parts of the weights, all computed here."""
    context = in_dtype(context, dtype)
    experts = make_experts(context, problem)
    evaluations = [parity.evaluate(context, experts, problem, rank) for rank in range(ep)]
    ep_rank, tp_rank = coordinates(context, ep, tp)
    gradients = {
        name: local_part(sum(e.parameter_gradients[name] for e in evaluations), name, ep, tp, ep_rank, tp_rank)
        for name in ("w1", "w2", "w3")
    }
    return parity.compare(context, replace(evaluations[ep_rank], parameter_gradients=gradients), problem, ep, tp)


def odd_inputs(context, dtype, ep, tp, problem):
    """Errors of the gradient of x for a plain sum, where x is as it comes, transposed, or cut out of something wide."""
    ep_rank, found = expert_cases.odd_inputs(in_dtype(context, dtype), ep, tp, problem)
    x, counts = problem.x[ep_rank], problem.counts[ep_rank]
    weights = problem.w1, problem.w2, problem.w3
    expected = oracle.grouped_experts_gradients(np.ones_like(x), x, counts, *weights).x
    dim = x.shape[1]
    gradients = {name: evaluation.input_gradients[0] for name, evaluation in found.items()}
    same = gradients["plain"], gradients["transposed"].T, gradients["columns"][:, dim : 2 * dim]
    return [oracle.relative_error(gradient, expected) for gradient in same]


def backends(context, ep, tp):
    """Backend and device of everything that a mesh and sharded experts are made of."""
    style = hp.ExpertTensorParallel()
    mesh = mesh_for(context, style, ep, tp)
    experts = style.apply(make_experts(context, oracle.make_problem(ep, 4, 6, 8)), mesh)
    return {
        "device": mesh.device_type,
        "groups": {dist.get_backend(mesh.get_group(axis)) for axis in ("ep", "tp")},
        "classes": {type(mesh.get_group(axis)._get_backend(torch.device("npu"))).__name__ for axis in ("ep", "tp")},
        "weights": {parameter.to_local().device.type for parameter in experts.parameters()},
        "device_index": experts.w1.to_local().device.index,
    }


def moe_layer(context, dtype, **arguments):
    """Relative errors of a MoE layer over the ranks against the same layer on one device in the same dtype."""
    return variant_cases.against_one_device(in_dtype(context, dtype), **arguments)


def swapped_splits(context, problem):
    """What is raised when every rank mixes up what it sends and what it receives."""
    return message_of(
        lambda: parity.errors(context, "ExpertTensorParallel", 4, 1, problem, breaks=("swap_splits",)),
    )


def message_of(function):
    """What the call raised; None if it did not."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def wrong_calls(context):
    """Mistakes that torch_npu, HCCL or the simulation must notice, on every rank alike."""
    x = torch.ones(4, 3, device="npu")
    everyone_one = [1] * context.world_size
    uneven = [2, 1, 1, 0] if context.rank == 1 else everyone_one
    return {
        "cpu tensor": message_of(lambda: dist.all_reduce(torch.ones(3))),
        "splits do not sum": message_of(
            lambda: dist.all_to_all_single(torch.empty_like(x), x, everyone_one, [1, 1, 1, 2])
        ),
        "splits disagree": message_of(lambda: dist.all_to_all_single(torch.empty_like(x), x, everyone_one, uneven)),
        "sizes disagree": message_of(lambda: dist.all_reduce(torch.ones(3 + context.rank, device="npu"))),
        "dtypes disagree": message_of(
            lambda: dist.all_reduce(torch.ones(3, device="npu").to(torch.int32 if context.rank else torch.float32))
        ),
        "two devices": message_of(lambda: x + torch.ones(4, 3)),
        "no such device": message_of(lambda: torch.npu.set_device(9)),
        "still works": message_of(lambda: dist.all_reduce(x)),
    }


def rank_stays_away(context):
    """Collectives to which one rank of a group does not come: what the other gets.

    Returns:
        Of rank 0: the error in a group of which nothing was asked before, in one that has worked, and in that again.
    """
    fresh, used = dist.new_group([0, 1]), dist.new_group([0, 1])

    def all_reduce(group):
        dist.all_reduce(torch.ones(3, device="npu"), group=group)

    if context.rank < 2:
        all_reduce(used)
    if context.rank != 0:
        return None
    with limit_of_collectives(1):
        return [message_of(functools.partial(all_reduce, group)) for group in (fresh, used, used)]


@contextmanager
def limit_of_collectives(seconds):
    before = os.environ["NPU_SIM_LIMIT_S"]
    os.environ["NPU_SIM_LIMIT_S"] = str(seconds)
    try:
        yield
    finally:
        os.environ["NPU_SIM_LIMIT_S"] = before
