"""Training steps on MindSpore against one device."""

import copy

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import hyper_parallel as hp
from tests.distributed.training_cases import (
    DIM,
    HIDDEN_DIM,
    MAX_NORM,
    NORM_TYPES,
    NUM_EXPERTS,
    RULES,
    TOP_K,
    batches,
    largest_error,
    own_part,
    place,
    rule,
)
from tests.harness import oracle
from tests.harness.setting import whole_mesh

PLAN = {"moe.experts": hp.ExpertTensorParallel(), "moe.shared_experts": hp.TensorParallel()}


class Model(nn.Cell):
    def __init__(self, seed=0, **keywords):
        super().__init__()
        ms.set_seed(seed)
        hp.set_platform("mindspore")
        self.enter = nn.Dense(DIM, DIM)
        self.norm = nn.LayerNorm((DIM,))
        self.moe = hp.MoE(DIM, HIDDEN_DIM, NUM_EXPERTS, TOP_K, num_shared_experts=1, **keywords)
        self.leave = nn.Dense(DIM, DIM)

    def construct(self, x):
        h = self.enter(x)
        return self.leave(h + self.moe(self.norm(h)))


def prepare(context, ep, tp, **keywords):
    """(mesh, model laid out over its ep and tp, the same model whole, batches of all ranks)."""
    mesh = whole_mesh("mindspore", context.world_size, ep, tp)
    model = Model(**keywords)
    whole = copy.deepcopy(model)
    hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
    return mesh, model, whole, batches(mesh["dp"].size() * ep)


def arrays(tensors):
    return [tensor.asnumpy() for tensor in tensors]


def gradients_of(model, x, num_tokens):
    def loss(x):
        return model(x).square().sum() / num_tokens

    return ms.value_and_grad(loss, None, model.trainable_params())(Tensor(x))[1]


def norm_of(grads, norm_type):
    flat = np.concatenate([gradient.ravel() for gradient in arrays(grads)])
    return np.linalg.norm(flat.astype(np.float64), norm_type)


def step(context, ep, tp, op="sum"):
    """Errors against one device of gradients (and by a wrong rule), norms, clipped gradients, and weights after two
    steps; and the norm."""
    mesh, model, whole, tokens = prepare(context, ep, tp)
    spread = mesh["dp", "ep"]
    own, num_tokens = tokens[place(mesh)], 12 * (spread.size() if op == "sum" else 1)
    parameters, references = model.trainable_params(), whole.trainable_params()
    # eps above the noise of fp32 gradients, which Adam would otherwise blow up to full steps.
    optimizers = [nn.AdamWeightDecay(each, 1e-2, eps=1e-4) for each in (parameters, references)]
    errors = {}
    for number in range(2):
        backward = gradients_of(model, own, num_tokens)
        expected = gradients_of(whole, np.concatenate(tokens), 12 * spread.size())
        for kind in RULES if number == 0 else RULES[-1:]:
            with rule(kind):
                grads = hp.reduce_gradients(parameters, spread, backward, op)
            errors.setdefault(kind, largest_error(arrays(grads), arrays(expected), parameters))
        for norm_type in NORM_TYPES if number == 0 else ():
            _, norm = hp.clip_grad_norm_(parameters, float("inf"), norm_type, grads=grads)
            errors[f"norm {norm_type}"] = oracle.relative_error(norm.asnumpy(), norm_of(expected, norm_type))
        grads, norm = hp.clip_grad_norm_(parameters, MAX_NORM, grads=grads)
        expected_norm = norm_of(expected, 2)
        assert expected_norm > 2 * MAX_NORM
        expected = tuple(gradient * (MAX_NORM / expected_norm) for gradient in expected)
        errors.setdefault("clipped", largest_error(arrays(grads), arrays(expected), parameters))
        for optimizer, each in zip(optimizers, (grads, expected), strict=True):
            optimizer(each)
    errors["weights"] = largest_error(arrays(parameters), arrays(references), parameters)
    return errors, float(norm.asnumpy())


def finite(context):
    """all_finite on each rank: at first; with one rank's shard NaN; with one replica's infinity, given the mesh; and
    whether the norm of infinite order of a model with one NaN is NaN."""
    mesh, model, _, tokens = prepare(context, 2, 2)
    parameters = model.trainable_params()
    grads = hp.reduce_gradients(parameters, mesh["dp", "ep"], gradients_of(model, tokens[place(mesh)], 12))
    answers = [hp.all_finite(parameters, grads)]
    shard, replica = (next(i for i, p in enumerate(parameters) if name in p.name) for name in ("experts.w1", "enter"))
    with_nan = _spoilt(grads, shard, np.nan) if context.rank == 3 else grads
    answers.append(hp.all_finite(parameters, with_nan))
    _, norm = hp.clip_grad_norm_(parameters, 1.0, float("inf"), grads=with_nan)
    with_infinity = _spoilt(grads, replica, np.inf) if context.rank == 1 else grads
    answers.append(hp.all_finite(parameters, with_infinity, mesh=mesh))
    return answers, bool(np.isnan(norm.asnumpy()))


def _spoilt(grads, position, number):
    array = grads[position].asnumpy().copy()
    array.flat[0] = number
    return (*grads[:position], Tensor(array), *grads[position + 1 :])


def synchronized(context):
    """Replicas that were drawn with other seeds: what "check" says, and what differs after "broadcast"."""
    mesh = whole_mesh("mindspore", context.world_size, 2, 1)
    dp, ep = mesh.get_local_rank("dp"), mesh.get_local_rank("ep")
    model, first = Model(seed=1 + 2 * dp + ep), Model(seed=1)
    hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
    said = message_of(lambda: hp.synchronize_parameters(model, mesh))
    hp.synchronize_parameters(model, mesh, how="broadcast")
    hp.synchronize_parameters(model, mesh)
    pairs = zip(model.trainable_params(), first.trainable_params(), strict=True)
    return said, [p.name for p, q in pairs if not np.array_equal(p.asnumpy(), own_part(q.asnumpy(), p))]


def message_of(trial):
    try:
        trial()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
