"""Cases about the MoE layer, run on every rank; each returns plain values that a test looks at."""

import copy
import os
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.exchange import rows
from hyper_parallel.platform import get_platform
from tests.distributed.error_cases import raised
from tests.harness import moe_oracle as oracle
from tests.harness.recording import recorded
from tests.harness.setting import (
    HIDDEN_DIM,
    coordinates,
    get_platform_class,
    local_part,
    mesh_for,
    to_dtype,
    whole_mesh,
)

GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2}
NORM = {"route_norm": True, "route_scale": 1.5}
# Settings, what becomes of the shared expert, and the shape of the tokens of one ep rank.
VARIANTS = {
    "before": (oracle.Settings(score_position="before", num_shared_experts=1, **NORM, **GROUPS), "replicated", None),
    "inside": (
        oracle.Settings(score_position="inside", score_func="sigmoid", num_shared_experts=2, **NORM, **GROUPS),
        "sharded",
        (3, 4, 6),
    ),
    "after": (oracle.Settings(score_position="after", score_func="sigmoid", top_k=3), "replicated", None),
}


def make_moe(context, problem, dtype=None, **keywords):
    """A MoE layer with the problem's weights and bias, in the adapter's float type, on one device."""
    hp.set_platform(context.platform)
    num_experts, hidden, dim = problem.weights["experts.w1"].shape
    if problem.bias is not None:
        keywords = {"bias_update_rate": 0.001, **keywords}
    moe = hp.MoE(dim, hidden, num_experts, problem.settings.top_k, **problem.settings.keywords, **keywords)
    for name, weight in problem.weights.items():
        context.framework.set_parameter(moe, name, weight)
    if problem.bias is not None:
        context.framework.fill(moe.expert_bias, problem.bias)
    return to_dtype(context, moe, dtype or context.framework.dtype)


def parallel_moe(
    context, problem, ep, tp, shared="replicated", style="ExpertTensorParallel", style_arguments=None, **keywords
):
    """The same with sharded experts; ``shared`` says where the shared expert is, if there is one."""
    moe, style = make_moe(context, problem, **keywords), getattr(hp, style)(**(style_arguments or {}))
    style.apply(moe.experts, mesh_for(context, style, ep, tp))
    if shared == "sharded":
        dense = hp.TensorParallel()
        dense.apply(moe.shared_experts, mesh_for(context, dense, ep, tp))
    return moe


def evaluate(context, moe, problem, ep_rank, shape=None):
    """Loss, output and gradients of the layer on the tokens of one ep rank, given as ``shape`` [B, S, D]."""
    adapter = context.framework
    x, target = problem.x[ep_rank], problem.targets[ep_rank]
    target = adapter.tensor(target if shape is None else target.reshape(shape))

    def function(x):
        y = moe(x)
        return adapter.loss(y, target), y

    return adapter.value_and_gradients(function, [adapter.tensor(x if shape is None else x.reshape(shape))], moe)


def sums_in_wider_dtype(context, problem, tp):
    """Outputs in float32 whose sum over tp is formed in float64, in float32, and of each tp rank's slice alone."""
    adapter = context.framework
    x = adapter.tensor(problem.x[0], "float32")
    arguments = {"style": "TensorParallel", "dtype": "float32"}
    wider = {"reduce_dtype": adapter.dtype_object("float64")}
    wide = parallel_moe(context, problem, 1, tp, style_arguments=wider, **arguments)
    narrow = parallel_moe(context, problem, 1, tp, **arguments)
    slices = [
        make_moe(context, replace(problem, weights=_slice_of_hidden(problem.weights, tp, r)), "float32")
        for r in range(tp)
    ]
    return adapter.array(wide(x)), adapter.array(narrow(x)), [adapter.array(moe(x)) for moe in slices]


def _slice_of_hidden(weights, tp, tp_rank):
    cut = {name: local_part(weights[f"experts.{name}"], name, 1, tp, 0, tp_rank) for name in HIDDEN_DIM}
    return {**weights, **{f"experts.{name}": weight for name, weight in cut.items()}}


def evaluations(context, problem, ep, tp, shape=None, breaks=(), **keywords):
    """(ep, tp) of this rank, its evaluation, and the layer's count of its routed rows."""
    moe = parallel_moe(context, problem, ep, tp, **keywords)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    with sabotage(context, problem, *breaks):
        evaluation = evaluate(context, moe, problem, ep_rank, shape)
    return (ep_rank, tp_rank), evaluation, load(context, moe)


def debug_mode(context, problem, style):
    """In debug mode: the error of a call with equal tokens over tp, and of one whose tokens differ there; or None."""
    adapter = context.framework
    moe = parallel_moe(context, problem, 2, 2, style=style)
    ep_rank, tp_rank = coordinates(context, 2, 2)
    messages = []
    with mock.patch.dict(os.environ, HYPER_PARALLEL_DEBUG="1"):
        for shift in (0.0, 0.5 * tp_rank):
            try:
                moe(adapter.tensor(problem.x[ep_rank] + shift))
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
    return messages


def weights_only(context, problem, ep, tp):
    """As ``evaluations``, with tokens that nobody asks the gradient of: a first layer's, say."""
    adapter, moe = context.framework, parallel_moe(context, problem, ep, tp)
    ep_rank, tp_rank = coordinates(context, ep, tp)
    x, target = adapter.tensor(problem.x[ep_rank]), adapter.tensor(problem.targets[ep_rank])

    def function():
        y = moe(x)
        return adapter.loss(y, target), y

    return (ep_rank, tp_rank), adapter.value_and_gradients(function, [], moe), load(context, moe)


def load(context, moe):
    return context.framework.array(moe.tokens_per_expert).astype(np.int64).tolist()


@contextmanager
def sabotage(context, problem, *kinds):
    """Break the layer in a known way, to show that a test would see it."""
    platform = get_platform_class(context.platform)
    copy_to_group, probabilities, detach = platform.copy_to_group, platform.probabilities, platform.detach

    def drop_sum_of(what):
        return lambda self, x, group, name, *dtype: x if what in name else copy_to_group(self, x, group, name, *dtype)

    def bias_in_scores():  # and taken out again where it is added for the choice, so that the choice stays
        bias = context.framework.tensor(problem.bias)
        return {
            "probabilities": lambda self, logits_TE, score_func: probabilities(self, logits_TE, score_func) + bias,
            "detach": lambda self, x: detach(self, x) - bias,
        }

    breaks = {
        "drop_tp_sum": {"reduce_from_group": lambda self, x, *_: x},
        "drop_sum_of_scores": {"copy_to_group": drop_sum_of("scores")},
        "drop_sum_of_tokens": {"copy_to_group": drop_sum_of("tokens")},
        "bias_in_scores": bias_in_scores(),
    }
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.multiple(platform, **breaks[kind]))
        yield


def collectives(context, problem, ep, tp, **keywords):
    """Collectives of forward and of backward, and this rank's groups."""
    moe = parallel_moe(context, problem, ep, tp, **keywords)
    mesh = whole_mesh(context.platform, context.world_size, ep, tp, context.framework.device_type)
    dp_rank, ep_rank, tp_rank = mesh.get_coordinate()
    whole = np.arange(context.world_size).reshape(-1, ep, tp)
    adapter, forward = context.framework, []

    with recorded(context) as calls:

        def function(x):
            y = moe(x)
            forward.extend(calls)
            return adapter.total(y * y), y

        adapter.value_and_gradients(function, [adapter.tensor(problem.x[ep_rank])], moe)
    return {
        "forward": [(call.verb, call.ranks) for call in forward],
        "backward": [(call.verb, call.ranks) for call in calls[len(forward) :]],
        "ep": tuple(whole[dp_rank, :, tp_rank].tolist()),
        "tp": tuple(whole[dp_rank, ep_rank].tolist()),
    }


def order_of_calls(context, problem, ep, tp):
    """The platform's verbs as one forward calls them, with "in" or "out" where dispatch or combine does."""
    moe, platform, calls, step = parallel_moe(context, problem, ep, tp), get_platform_class(context.platform), [], [""]

    def recording(verb):
        original = getattr(platform, verb)

        def call(self, *args, **kwargs):
            calls.append(verb + step[0])
            return original(self, *args, **kwargs)

        return call

    def during(function, name):
        original = getattr(rows, function)

        def call(*args, **kwargs):
            step[0] = name
            try:
                return original(*args, **kwargs)
            finally:
                step[0] = ""

        return call

    verbs = ("start_counts_exchange", "permute", "unpermute", "all_to_all_rows")
    steps = {"send_rows": " in", "return_rows": " out"}
    with (
        mock.patch.multiple(platform, **{verb: recording(verb) for verb in verbs}),
        mock.patch.multiple(rows, **{function: during(function, name) for function, name in steps.items()}),
    ):
        moe(context.framework.tensor(problem.x[coordinates(context, ep, tp)[0]]))
    return calls


def one_step(context, problem, ep, tp, learning_rate):
    """The gates after a step with gradients summed over ep."""
    moe, adapter = parallel_moe(context, problem, ep, tp), context.framework
    ep_rank, tp_rank = coordinates(context, ep, tp)
    gradient = adapter.tensor(evaluate(context, moe, problem, ep_rank).parameter_gradients["router.gate.weight"])
    group = mesh_for(context, hp.ExpertTensorParallel(), ep, tp).get_group("ep")
    gradient = adapter.array(get_platform().sum_over_group(gradient, group, "test: sum of the gate's gradient"))
    gate = adapter.parameters(moe)["router.gate.weight"]
    before = adapter.array(gate)
    adapter.fill(gate, before - learning_rate * gradient)
    return (ep_rank, tp_rank), before, adapter.array(gate), gradient


def recomputing(context, moe, how):
    """``moe`` as a function that forgets what it computed and computes it again backward."""
    if how is None:
        return moe
    if context.platform == "mindspore":
        moe.recompute()
        return moe
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(moe, x, use_reentrant=how == "reentrant")


def without_gradients(context):
    if context.platform == "mindspore":
        return nullcontext()  # Outside of value_and_grad nothing is differentiated.
    import torch

    return torch.no_grad()


def counted_load(context, problem, ep, tp, how):
    """The counter after: evaluation, one step, evaluation, two micro-batches more; and that of a deep copy, taken in
    between, after a step of its own. Gradients of the first step."""
    moe, adapter = parallel_moe(context, problem, ep, tp), context.framework
    ep_rank, _ = coordinates(context, ep, tp)
    counts, x = [], adapter.tensor(problem.x[ep_rank])

    def evaluation_forward(run):
        with without_gradients(context):
            run(x)
        counts.append(load(context, moe))

    def step(module, *runs):
        def function(x):
            loss = sum(adapter.total(y * y) for y in (run(x) for run in runs))
            return loss, loss

        return adapter.value_and_gradients(function, [x], module).parameter_gradients

    clone = copy.deepcopy(moe)  # MindSpore cannot copy a cell that recomputes.
    run = recomputing(context, moe, how)
    evaluation_forward(run)
    gradients = step(moe, run)
    counts.append(load(context, moe))
    evaluation_forward(run)
    plain = step(clone, clone)
    step(moe, run, run)
    counts.append(load(context, moe))
    return ep_rank, counts, load(context, clone), gradients, plain


def updated_bias(context, problem, ep, tp, rate):
    """Load of one step, bias before and after the update, and the counter after."""
    moe = parallel_moe(context, problem, ep, tp, bias_update_rate=rate)
    ep_rank, _ = coordinates(context, ep, tp)
    evaluate(context, moe, problem, ep_rank)
    counted, before = load(context, moe), context.framework.array(moe.expert_bias)
    moe.update_expert_bias(mesh_for(context, hp.ExpertTensorParallel(), ep, tp)["ep"])
    kept = str(moe.tokens_per_expert.dtype).lower(), str(moe.expert_bias.dtype).lower()
    return ep_rank, counted, before, context.framework.array(moe.expert_bias), load(context, moe), kept


def updated_bias_over(context, problem, names):
    """The bias after an update over other axes: none, or several of a mesh (dp, ep, tp) of 2 x 2 x 1 ranks."""
    moe = make_moe(context, problem, bias_update_rate=0.5)
    rank = context.rank
    context.framework.fill(moe.tokens_per_expert, np.asarray([rank, 0, 4, 1 + rank, 2, 2, 2, 2]))
    mesh = whole_mesh(context.platform, context.world_size, 2, 1, context.framework.device_type)
    moe.update_expert_bias(mesh[names] if names else None)
    return context.framework.array(moe.expert_bias)


def balanced_load(context, problem, ep, tp, rate, steps):
    """Largest load over mean load, over all ep ranks, step by step."""
    moe = parallel_moe(context, problem, ep, tp, bias_update_rate=rate)
    mesh = mesh_for(context, hp.ExpertTensorParallel(), ep, tp)["ep"]
    ep_rank, _ = coordinates(context, ep, tp)
    per_step = []
    for _ in range(steps):
        evaluate(context, moe, problem, ep_rank)
        per_step.append(load(context, moe))
        moe.update_expert_bias(mesh)
    return ep_rank, np.array(per_step)


def errors(context, problem):
    """What wrong arguments raise: (kind, message) per name."""
    hp.set_platform(context.platform)
    router = {
        "top_k_zero": {"top_k": 0},
        "top_k_large": {"top_k": 9},
        "score_func": {"top_k": 2, "score_func": "tanh"},
        "half_of_groups": {"top_k": 2, "num_expert_groups": 4},
        "other_half_of_groups": {"top_k": 2, "num_limited_groups": 1},
        "uneven_groups": {"top_k": 2, "num_expert_groups": 3, "num_limited_groups": 1},
        "groups_of_one": {"top_k": 2, "num_expert_groups": 8, "num_limited_groups": 4},
        "too_many_groups": {"top_k": 2, "num_expert_groups": 4, "num_limited_groups": 5},
        "no_groups": {"top_k": 2, "num_expert_groups": 4, "num_limited_groups": 0},
        "groups_too_small": {"top_k": 5, "num_expert_groups": 4, "num_limited_groups": 2},
    }
    found = {}

    def attempt(name, function):
        found[name] = raised(function)

    for name, keywords in router.items():
        attempt(f"router {name}", lambda keywords=keywords: hp.TokenChoiceTopKRouter(6, 8, **keywords))
        attempt(f"moe {name}", lambda keywords=keywords: hp.MoE(6, 4, 8, **keywords))
    attempt("moe score_position", lambda: hp.MoE(6, 4, 8, 2, score_position="between"))
    attempt("moe unknown", lambda: hp.MoE(6, 4, 8, 2, route_nrom=True))
    moe = hp.MoE(6, 4, 8, 2)
    mesh = whole_mesh(context.platform, context.world_size, 2, 2, context.framework.device_type)["ep"]
    attempt("update without bias", lambda: moe.update_expert_bias(mesh))
    found["bias without rate"] = moe.expert_bias is None
    return found
