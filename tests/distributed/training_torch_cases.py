"""Training steps on torch against one device."""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

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


class Model(nn.Module):
    def __init__(self, seed=0, **keywords):
        super().__init__()
        torch.manual_seed(seed)
        hp.set_platform("torch")
        self.enter = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.moe = hp.MoE(DIM, HIDDEN_DIM, NUM_EXPERTS, TOP_K, num_shared_experts=1, **keywords)
        self.leave = nn.Linear(DIM, DIM)
        self.double()

    def forward(self, x):
        h = self.enter(x)
        return self.leave(h + self.moe(self.norm(h)))


def prepare(context, ep, tp, **keywords):
    """(mesh, model laid out over its ep and tp, the same model whole, batches of all ranks)."""
    mesh = whole_mesh("torch", context.world_size, ep, tp)
    model = Model(**keywords)
    whole = copy.deepcopy(model)
    hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
    tokens = [torch.from_numpy(batch).double() for batch in batches(mesh["dp"].size() * ep)]
    return mesh, model, whole, tokens


def loss_of(model, x, num_tokens):
    return model(x).square().sum() / num_tokens


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().numpy()


def gradients(model):
    return [local(p.grad) for p in model.parameters()]


def whole_gradients(model):
    return [p.grad.numpy() for p in model.parameters()]


def step(context, ep, tp, op="sum"):
    """Errors against one device of gradients (and by a wrong rule), norms, clipped gradients, and weights after two
    steps; and the norm."""
    mesh, model, whole, tokens = prepare(context, ep, tp)
    spread = mesh["dp", "ep"]
    own, num_tokens = tokens[place(mesh)], 12 * (spread.size() if op == "sum" else 1)
    parameters, references = list(model.parameters()), list(whole.parameters())
    optimizers = [torch.optim.AdamW(hp.parameter_groups(each), lr=1e-2, foreach=True) for each in (model, whole)]
    errors = {}
    for number in range(2):
        for each in (model, whole):
            each.zero_grad()
        loss_of(whole, torch.cat(tokens), 12 * spread.size()).backward()
        for kind in RULES if number == 0 else RULES[-1:]:
            model.zero_grad()
            loss_of(model, own, num_tokens).backward()
            with rule(kind):
                assert hp.reduce_gradients(iter(parameters), spread, op=op) is None
            errors.setdefault(kind, largest_error(gradients(model), whole_gradients(whole), parameters))
        for norm_type in NORM_TYPES if number == 0 else ():
            norms = (
                hp.clip_grad_norm_(parameters, torch.inf, norm_type),
                nn.utils.get_total_norm([p.grad for p in references], norm_type),
            )
            errors[f"norm {norm_type}"] = oracle.relative_error(*norms)
        norm = hp.clip_grad_norm_(parameters, MAX_NORM)
        assert nn.utils.clip_grad_norm_(references, MAX_NORM) > 2 * MAX_NORM and type(norm) is torch.Tensor
        errors.setdefault("clipped", largest_error(gradients(model), whole_gradients(whole), parameters))
        for optimizer in optimizers:
            optimizer.step()
    errors["weights"] = largest_error([local(p) for p in parameters], [local(p) for p in references], parameters)
    return errors, norm.item()


def with_fsdp(context, ep, tp):
    """The same with the dense part over dp x ep and the experts over dp by FSDP2, which sums; only norms are ours."""
    mesh, model, whole, tokens = prepare(context, ep, tp)
    flat = mesh["dp", "ep"]._flatten("dp_ep")
    fully_shard(model.moe.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=flat)
    for module in (model, model.moe.experts):
        module.set_gradient_divide_factor(1.0)
    num_tokens = 12 * flat.size()
    loss_of(model, tokens[place(mesh)], num_tokens).backward()
    loss_of(whole, torch.cat(tokens), num_tokens).backward()
    hp.reduce_gradients(model.parameters(), mesh["dp", "ep"])  # changes nothing: all is summed
    found = [p.grad.full_tensor().numpy() for p in model.parameters()]
    reduced = max(oracle.relative_error(*pair) for pair in zip(found, whole_gradients(whole), strict=True))
    norm = hp.clip_grad_norm_(model.parameters(), MAX_NORM)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    found = [p.grad.full_tensor().numpy() for p in model.parameters()]
    clipped = max(oracle.relative_error(*pair) for pair in zip(found, whole_gradients(whole), strict=True))
    groups = hp.parameter_groups(model)
    torch.optim.AdamW(groups, fused=True).step()
    return {"gradients": reduced, "norm": oracle.relative_error(norm, expected), "clipped": clipped}, len(groups)


def partial(context):
    """A gradient that is a term of a sum over tp is summed; one missing on some ranks counts as zeros there."""
    mesh = whole_mesh("torch", context.world_size, 2, 2)
    placed = torch.distributed.tensor.DTensor.from_local(torch.zeros(3), mesh["tp"], [hp_torch("Replicate")])
    parameter = nn.Parameter(placed)
    terms = torch.full((3,), 1.0 + mesh.get_local_rank("tp"))
    parameter.grad = torch.distributed.tensor.DTensor.from_local(terms, mesh["tp"], [hp_torch("Partial")])
    sometimes, never, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    frozen.requires_grad_(False)
    if mesh.get_local_rank("ep") == 1:
        sometimes.grad = torch.ones(2)
    hp.reduce_gradients([parameter, sometimes, never, frozen], mesh["dp", "ep"])
    return local(parameter.grad).tolist(), sometimes.grad.tolist(), never.grad, frozen.grad


def hp_torch(name):
    return getattr(torch.distributed.tensor, name)()


def refusals(context):
    """What is refused, on every rank, by name."""
    rank = context.rank
    dense, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    flat = hp.init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("all",))
    experts = Model().moe.experts
    hp.ExpertTensorParallel().apply(experts, whole_mesh("torch", context.world_size, 2, 1)["ep", "tp"])
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    dense.grad = torch.ones(2) * (float("inf") if rank == 1 else 1.0)
    trials = {
        "other parameters": lambda: hp.reduce_gradients([dense, other][: 1 + rank % 2], flat),
        "flattened": lambda: hp.reduce_gradients(experts.parameters(), flat),
        "sparse": lambda: hp.reduce_gradients(sparse.parameters(), flat),
        "grads": lambda: hp.reduce_gradients([dense], flat, grads=[torch.ones(2)]),
        "op": lambda: hp.reduce_gradients([dense], flat, op="max"),
        "not a mesh": lambda: hp.reduce_gradients([dense], "ep"),
        "used up": lambda: hp.reduce_gradients(iter(()), flat) or hp.clip_grad_norm_(iter(()), 1.0),
        "norm_type": lambda: hp.clip_grad_norm_([dense], 1.0, 0.0),
        "nonfinite": lambda: hp.clip_grad_norm_([nn.Parameter(torch.zeros(0)), infinite()], 1.0, 2.0, True),
    }

    def infinite():
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), float("nan"))
        return parameter

    return {name: message_of(trial) for name, trial in trials.items()}


def message_of(trial):
    try:
        trial()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def finite(context):
    """all_finite on each rank: at first; with one rank's shard infinite; with one replica's NaN, without and with mesh;
    and the norms of infinite order of a model whose shard on one rank holds a NaN."""
    mesh, model, _, tokens = prepare(context, 2, 2)
    parameters = list(model.parameters())
    loss_of(model, tokens[place(mesh)], 12).backward()
    hp.reduce_gradients(parameters, mesh["dp", "ep"])
    answers = [hp.all_finite(parameters)]
    shard, replica = model.moe.experts.w1.grad.to_local(), model.enter.weight.grad
    kept = shard[0, 0, 0].item()
    if context.rank == 3:
        shard[0, 0, 0] = torch.nan
    answers.append(hp.all_finite(parameters))
    norm = hp.clip_grad_norm_(parameters, 1.0, torch.inf)
    shard[0, 0, 0] = kept
    hp.reduce_gradients(parameters, mesh["dp", "ep"])  # clipping by NaN has spoiled all
    for p in parameters:
        torch.nan_to_num_(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad)
    if context.rank == 1:
        replica[0, 0] = torch.inf
    answers += [hp.all_finite(parameters, mesh=mesh)]
    return answers, norm.isnan().item()


def collectives(context):
    """How many all-reduces a model of 10 layers takes, and how large gradients are cut into buckets."""
    from hyper_parallel.training.gradients import buckets
    from tests.harness.recording import recorded

    mesh = whole_mesh("torch", context.world_size, 1, 2)
    model = nn.ModuleList(Model() for _ in range(10))
    hp.parallelize_module(model, mesh["ep", "tp"], {f"*.{name}": style for name, style in PLAN.items()})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with recorded(context) as calls:
        hp.reduce_gradients(model.parameters(), mesh["dp", "ep"])
        summed = len(calls)
        hp.clip_grad_norm_(model.parameters(), 1.0)
    sizes = [torch.zeros(size) for size in (3, 2, 1, 9, 1)]
    cut = list(buckets([("dp", i, tensor) for i, tensor in enumerate(sizes)], limit=16))
    return summed, len(calls) - summed, cut


def synchronized(context):
    """Replicas that were drawn with other seeds: what "check" says, and what a step gives after "broadcast"."""
    mesh = whole_mesh("torch", context.world_size, 2, 1)
    dp, ep = mesh.get_local_rank("dp"), mesh.get_local_rank("ep")
    model, first = Model(seed=2 * dp + ep), Model(seed=0)
    hp.parallelize_module(model, mesh["ep", "tp"], PLAN)
    said = message_of(lambda: hp.synchronize_parameters(model, mesh))
    hp.synchronize_parameters(model, mesh, how="broadcast")
    hp.synchronize_parameters(model, mesh)
    names = [name for name, _ in model.named_parameters()]
    equal = [bool((local(p) == own_part(local(q), p)).all()) for p, q in zip(model.parameters(), first.parameters())]
    return said, [name for name, same in zip(names, equal) if not same]


def load(context, variant):
    """load_metrics after two micro-batches, those of a second look after a reset, and the rows of each expert that the
    whole model's router gives over all ranks."""
    mesh, model, whole, _ = prepare(context, 2, 1)
    tokens = [torch.from_numpy(batch).double() for seed in range(2) for batch in batches(4, seed)]
    if variant == "frozen router":
        for module in (model.enter, model.norm, model.moe.router):
            module.requires_grad_(False)
    for x in (tokens[place(mesh)], tokens[4 + place(mesh)]):
        if variant == "recompute":
            checkpoint(lambda x: model(x).square().sum(), x, use_reentrant=False).backward()
        else:
            model(x).square().sum().backward()
        model.eval()(x)  # not counted
    ids = whole.moe.router(whole.norm(whole.enter(torch.cat(tokens))))[1]
    found = hp.load_metrics(model, mesh["dp", "ep"], reset=True)
    again = hp.load_metrics(model, mesh["dp", "ep"])
    return found, again, ids.flatten().bincount(minlength=NUM_EXPERTS).tolist()
