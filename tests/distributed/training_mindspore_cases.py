"""Training steps on MindSpore against one device."""

import copy
import os
import tempfile

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel.distributed import DistributedDataParallel

import hyper_parallel as hp
from hyper_parallel.training import TrainOneStepCell
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


class WithLoss(nn.Cell):
    """The mean over this rank's tokens, whose number is the same on every rank."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def construct(self, x):
        return self.model(x).square().sum() / x.shape[0]


def optimizer_of(model):
    return nn.AdamWeightDecay(model.trainable_params(), 1e-2, eps=1e-4)


def steps_of_one_device(whole, batches_of_steps):
    """Train the whole model, clipped, and return its weights."""
    optimizer = optimizer_of(whole)
    for batch in batches_of_steps:
        grads = gradients_of(whole, batch, len(batch))
        optimizer(tuple(gradient * (MAX_NORM / norm_of(grads, 2)) for gradient in grads))
    return arrays(whole.trainable_params())


def trained_by_model(context):
    """``Model.train`` with a callback: three steps of two accumulated batches, scaled and clipped. Errors of the
    weights, the losses that the callback saw, and what an overflow on one rank does on all."""
    mesh, model, whole, _ = prepare(context, 2, 2)
    ep = mesh.get_local_rank("ep")
    tokens = [batches(2, seed) for seed in range(6)]
    optimizer = optimizer_of(model)
    step = TrainOneStepCell(
        WithLoss(model),
        optimizer,
        mesh["dp", "ep"],
        max_norm=MAX_NORM,
        loss_scaler=ms.amp.DynamicLossScaler(1024, 2, 1000),
        accumulation_steps=2,
    )
    dataset = ms.dataset.NumpySlicesDataset([batch[ep] for batch in tokens], shuffle=False)
    seen = Losses()
    ms.train.Model(step).train(1, dataset, callbacks=[seen], dataset_sink_mode=False)
    together = [np.concatenate(tokens[i] + tokens[i + 1]) for i in (0, 2, 4)]
    expected = steps_of_one_device(whole, together)
    error = largest_error(arrays(model.trainable_params()), expected, model.trainable_params())

    before = arrays([p.copy() for p in model.trainable_params()])
    if context.rank == 3:  # its own part of an expert's gradient overflows
        differentiate = step._differentiate
        shard = next(i for i, p in enumerate(step.weights) if "experts.w1" in p.name)
        step._differentiate = lambda x: (lambda loss, grads: (loss, _spoilt(grads, shard, np.inf)))(*differentiate(x))
    left_out = [step(Tensor(tokens[0][ep])) for _ in range(2)][1]
    unchanged = all(np.array_equal(a, b) for a, b in zip(before, arrays(model.trainable_params()), strict=True))
    return error, seen.losses, bool(left_out[1].asnumpy()), float(left_out[2].asnumpy()), unchanged


class Losses(ms.train.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs[0].asnumpy()))


def refused_steps(context):
    """What a step cell and shards refuse, and what MindSpore's own modes say."""
    mesh, model, whole, tokens = prepare(context, 2, 2)
    early = Model()
    optimizer = optimizer_of(early)
    hp.parallelize_module(early, mesh["ep", "tp"], PLAN)
    x = Tensor(tokens[0])
    step = TrainOneStepCell(WithLoss(model), optimizer_of(model), mesh["ep"])

    def in_graph_mode(function):
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            return function()
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    trials = {
        "early optimizer": lambda: TrainOneStepCell(WithLoss(early), optimizer, mesh["ep"]),
        "op": lambda: TrainOneStepCell(WithLoss(model), optimizer_of(model), mesh["ep"], op="max"),
        "step in GRAPH_MODE": lambda: in_graph_mode(lambda: step(x)),
        "DDP": lambda: DistributedDataParallel(model, process_group=mesh.get_group("ep")),
        "whole weight": lambda: model.moe.experts.w1.set_data(Tensor(whole.moe.experts.w1)),
        "jit": lambda: ms.jit(model)(x),
        "jit of the layer": lambda: ms.jit(model.moe)(x),
        "jit of experts": lambda: ms.jit(model.moe.experts)(x, Tensor([3, 3, 3, 3])),
        "GRAPH_MODE": lambda: in_graph_mode(lambda: model(x)),
        "gradient in GRAPH_MODE": lambda: in_graph_mode(lambda: gradients_of(model, tokens[0], 12)),
        "jit of unsharded": lambda: ms.jit(whole)(x),
    }
    return {name: message_of(trial) for name, trial in trials.items()}


def whole_checkpoint(context):
    """What each way of loading a whole checkpoint into shards says, and how many parameters it has changed."""
    _, model, whole, _ = prepare(context, 2, 2)
    for parameter in whole.get_parameters():
        parameter.set_data(parameter + 1)
    path = os.path.join(tempfile.mkdtemp(), "whole.ckpt")
    ms.save_checkpoint(whole, path)
    trials = {
        "load_param_into_net": lambda: ms.load_param_into_net(model, ms.load_checkpoint(path)),
        "strict": lambda: ms.load_param_into_net(model, ms.load_checkpoint(path), strict_load=True),
        "set_data": lambda: model.moe.experts.w1.set_data(Tensor(whole.moe.experts.w1)),
        "assign_value": lambda: model.moe.experts.w1.assign_value(Tensor(whole.moe.experts.w1)),
        "load_checkpoint": lambda: ms.load_checkpoint(path, model),
    }
    found, before = {}, arrays([p.copy() for p in model.get_parameters()])
    for name, trial in trials.items():
        said = message_of(trial)
        changed = sum(not np.array_equal(*pair) for pair in zip(before, arrays(model.get_parameters()), strict=True))
        found[name] = said, changed
    return found


def recomputed_before(context):
    """Errors of all gradients with ``recompute`` called before the styles are applied: on the layer, on its experts, on
    a cell around both, and with a plan or ``apply`` alone."""
    mesh = whole_mesh("mindspore", context.world_size, 2, 2)
    errors = {}
    for what in ("moe", "moe.experts", ""):
        for how in ("plan", "apply"):
            model, whole = Model(), Model()
            for ours, theirs in zip(whole.get_parameters(), model.get_parameters(), strict=True):
                ours.set_data(Tensor(theirs))
            getattr_path(model, what).recompute()
            if how == "plan":
                hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
            else:
                hp.ExpertTensorParallel().apply(model.moe.experts, mesh["ep", "tp"])
            tokens = batches(2)
            parameters = model.trainable_params()
            grads = hp.reduce_gradients(parameters, mesh["ep"], gradients_of(model, tokens[place(mesh)], 24))
            expected = arrays(gradients_of(whole, np.concatenate(tokens), 24))
            counted = int(model.moe.tokens_per_expert.asnumpy().sum())
            errors[f"{what}, {how}"] = largest_error(arrays(grads), expected, parameters), counted
    return errors


def getattr_path(cell, path):
    for name in filter(None, path.split(".")):
        cell = getattr(cell, name)
    return cell


def by_mindspores_reducer(context):
    """Errors with ``nn.DistributedGradReducer`` over ep, which sums what is not this rank's own."""
    mesh, model, whole, tokens = prepare(context, 2, 2)
    hp_free = [p for p in model.trainable_params() if "shared_experts" not in p.name]
    grads = dict(zip([p.name for p in model.trainable_params()], gradients_of(model, tokens[place(mesh)], 24)))
    reduce = nn.DistributedGradReducer(hp_free, mean=False, degree=2, group=mesh.get_group("ep"))
    reduced = reduce(tuple(grads[p.name] for p in hp_free))
    expected = dict(
        zip([p.name for p in whole.trainable_params()], arrays(gradients_of(whole, np.concatenate(tokens), 24)))
    )
    return largest_error(arrays(reduced), [expected[p.name] for p in hp_free], hp_free)


def in_mixed_precision(context):
    """Errors of the output against fp32 on one device, of a sharded model and of one device at the same level."""
    mesh = whole_mesh("mindspore", context.world_size, 2, 2)
    x = Tensor(batches(1)[0])
    exact = Model()(x).asnumpy()
    errors, here = {}, os.getcwd()
    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)  # O1 writes the source of rewritten cells to where it runs
    for level in ("O1", "O2", "O3", "auto"):
        found = []
        for sharded in (True, False):
            model = Model()
            for ours, theirs in zip(model.get_parameters(), Model().get_parameters(), strict=True):
                ours.set_data(Tensor(theirs))
            if sharded:
                hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
            net = ms.amp.auto_mixed_precision(model, level, ms.float16)
            grads = gradients_of(net, batches(1)[0], 12)
            found += [oracle.relative_error(net(x).astype(ms.float32).asnumpy(), exact)]
            assert all(np.isfinite(gradient).all() and gradient.dtype == np.float32 for gradient in arrays(grads))
        errors[level] = found
    os.chdir(here)
    folder.cleanup()
    return errors


def without_whole_weights(context):
    """A model whose weights are drawn after it was sharded: the largest weight tensor that was sent or drawn, and
    whether the shards of replicas agree, differ between experts, and train."""
    from unittest import mock

    from mindspore.nn.utils import no_init_parameters

    from hyper_parallel.platform.mindspore import cpu_collectives

    mesh = whole_mesh("mindspore", context.world_size, 2, 1)
    ms.set_seed(5)
    with no_init_parameters():
        experts = hp.GroupedExperts(DIM, HIDDEN_DIM, NUM_EXPERTS)
    sent = []
    with mock.patch.object(cpu_collectives, "broadcast", lambda x, *_: sent.append(x.shape) or x):
        hp.ExpertTensorParallel().apply(experts, mesh["ep", "tp"])
    experts.init_parameters_data()
    whole = experts.w1.full_tensor().asnumpy()
    hp.synchronize_parameters(experts, mesh["dp"])
    bound = 1 / np.sqrt(DIM)
    halves = np.split(whole, 2)
    return (
        sent,
        tuple(experts.w1.shape),
        float(whole.std() / (bound / np.sqrt(3))),
        bool((halves[0] == halves[1]).any()),
    )


def load(context, variant):
    """load_metrics after two micro-batches, those of a second look after a reset, and the rows of each expert that the
    whole model's router gives over all ranks."""
    mesh, model, whole, _ = prepare(context, 2, 1)
    tokens = [batch for seed in range(2) for batch in batches(4, seed)]
    if variant == "frozen router":
        for cell in (model.enter, model.norm, model.moe.router):
            for parameter in cell.get_parameters():
                parameter.requires_grad = False
    if variant == "recompute":
        model.recompute()
    for x in (tokens[place(mesh)], tokens[4 + place(mesh)]):
        gradients_of(model, x, 12)
        model(Tensor(x))  # not counted
    ids = whole.moe.router(whole.norm(whole.enter(Tensor(np.concatenate(tokens)))))[1].asnumpy()
    found = hp.load_metrics(model, mesh["dp", "ep"], reset=True)
    again = hp.load_metrics(model, mesh["dp", "ep"])
    return found, again, np.bincount(ids.ravel(), minlength=NUM_EXPERTS).tolist()
