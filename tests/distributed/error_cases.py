"""Cases that provoke the library's errors on a rank; each returns what was raised, and whether anything had changed."""

import numpy as np

import hyper_parallel as hp
from tests.distributed.expert_cases import parallel_experts
from tests.harness.recording import recorded
from tests.harness.setting import coordinates, whole_mesh


def raised(function, *args):
    """(type name, message) of what a call raises, or None."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fingerprint(context, module):
    """All that apply could change: class, and identity and values of the parameters."""
    parameters = context.framework.parameters(module)
    values = {name: context.framework.array(parameter).tolist() for name, parameter in parameters.items()}
    own = module._params if context.platform == "mindspore" else module._parameters
    return type(module), {name: id(parameter) for name, parameter in own.items()}, values


def try_apply(context, style, module, mesh):
    """What apply raises, whether the module stayed as it was, and the collectives that were issued."""
    before = fingerprint(context, module)
    with recorded(context) as calls:
        error = raised(getattr(hp, style)().apply, module, mesh)
    return error, fingerprint(context, module) == before, len(calls)


def meshes(context):
    hp.set_platform(context.platform)
    n = context.world_size
    shapes = {
        "swapped": ((2, n // 2), ("tp", "ep")),
        "etp": ((2, n // 2), ("ep", "etp")),
        "unnamed": ((2, n // 2), None),
        "one": ((n,), ("ep",)),
        "three": ((1, 2, n // 2), ("dp", "ep", "tp")),
    }
    return {key: hp.init_device_mesh("cpu", shape, mesh_dim_names=names) for key, (shape, names) in shapes.items()}


def wrong_meshes(context):
    """ExpertTensorParallel on meshes that do not fit."""
    experts = hp.GroupedExperts(4, 8, 8)
    return {key: try_apply(context, "ExpertTensorParallel", experts, mesh) for key, mesh in meshes(context).items()}


def wrong_modules(context):
    """Experts that cannot be sharded, each on a mesh that would do."""
    mesh = whole_mesh(context.platform, context.world_size, 4, 1)["ep", "tp"]
    wide = whole_mesh(context.platform, context.world_size, 1, 4)["ep", "tp"]
    modules = {
        "num_experts": ("ExpertTensorParallel", hp.GroupedExperts(4, 8, 6), mesh),
        "hidden_dim": ("ExpertTensorParallel", hp.GroupedExperts(4, 7, 8), wide),
        "missing": ("ExpertTensorParallel", without_w3(context), mesh),
        "shapes": ("ExpertTensorParallel", with_shape(context, "w2", (8, 8, 4)), mesh),
        "bias": ("ExpertTensorParallel", with_shape(context, "w2_bias", (8, 4)), mesh),
        "other bias": ("ExpertParallel", with_shape(context, "gain", (4,)), mesh["ep"]),
    }
    results = {key: try_apply(context, *arguments) for key, arguments in modules.items()}
    experts = hp.GroupedExperts(4, 8, 8)
    results["no module"] = raised(hp.ExpertTensorParallel().apply, "experts", mesh), True, 0
    results["no mesh"] = try_apply(context, "ExpertTensorParallel", experts, (2, 2))
    patched = hp.GroupedExperts(4, 8, 8)
    setattr(patched, "construct" if context.platform == "mindspore" else "forward", lambda *args: args)
    results["patched"] = try_apply(context, "ExpertTensorParallel", patched, mesh)
    return results


def new_parameter(context, shape):
    value = context.framework.tensor(np.ones(shape, np.float32), "float32")
    if context.platform == "mindspore":
        from mindspore import Parameter
    else:
        from torch.nn import Parameter
    return Parameter(value)


def with_shape(context, name, shape):
    experts = hp.GroupedExperts(4, 8, 8)
    setattr(experts, name, new_parameter(context, shape))
    return experts


def without_w3(context):
    if context.platform == "mindspore":
        from mindspore import nn

        module = nn.Cell()
    else:
        from torch import nn

        module = nn.Module()
    module.w1 = new_parameter(context, (8, 8, 4))
    module.w2 = new_parameter(context, (8, 4, 8))
    return module


def second_apply(context):
    """Every style after every style."""
    styles = {"ExpertParallel": ("ep",), "TensorParallel": ("tp",), "ExpertTensorParallel": ("ep", "tp")}
    whole = whole_mesh(context.platform, context.world_size, 2, context.world_size // 2)
    results = {}
    for first, names in styles.items():
        for second, other_names in styles.items():
            experts = hp.GroupedExperts(4, 8, 8)
            getattr(hp, first)().apply(experts, whole[names])
            results[first, second] = try_apply(context, second, experts, whole[other_names])
    return results


def wrong_calls(context, ep, tp, problem):
    """Inputs of one call that do not fit; what is raised and how many collectives came before it."""
    adapter = context.framework
    experts = parallel_experts(context, "ExpertTensorParallel", ep, tp, problem)
    ep_rank, _ = coordinates(context, ep, tp)
    x, counts, scores = problem.x[ep_rank], problem.counts[ep_rank], problem.scores[ep_rank]
    flipped = np.where(np.arange(len(counts)) == 0, -1, counts)
    flipped[1] += counts[0] + 1
    tensors = {
        "sum": (adapter.tensor(x), adapter.int_tensor(counts + 1)),
        "negative": (adapter.tensor(x), adapter.int_tensor(flipped)),
        "length": (adapter.tensor(x), adapter.int_tensor(counts[:-1])),
        "shape": (adapter.tensor(x), adapter.int_tensor(counts[None])),
        "float": (adapter.tensor(x), adapter.tensor(counts.astype(np.float32))),
        "list": (adapter.tensor(x), counts.tolist()),
        "numpy": (x, adapter.int_tensor(counts)),
        "width": (adapter.tensor(x[:, :-1]), adapter.int_tensor(counts)),
        "scores": (adapter.tensor(x), adapter.int_tensor(counts), adapter.tensor(scores[:-1])),
        "dtype": (adapter.tensor(x, "float16"), adapter.int_tensor(counts)),
    }
    results = {}
    for key, arguments in tensors.items():
        with recorded(context) as calls:
            results[key] = raised(experts, *arguments), len(calls)
    return results


def mixed_frameworks(context):
    """A module of this platform with a mesh, and with rows, of the other one."""
    import mindspore
    import torch

    other = "torch" if context.platform == "mindspore" else "mindspore"
    mesh = whole_mesh(context.platform, context.world_size, 2, context.world_size // 2)["ep", "tp"]
    hp.set_platform(other)
    foreign = hp.GroupedExperts(4, 8, 8)
    hp.set_platform(context.platform)
    rows = {"torch": torch.zeros(8, 4), "mindspore": mindspore.Tensor(np.zeros((8, 4), np.float32))}
    counts = {"torch": torch.ones(8, dtype=torch.int64), "mindspore": mindspore.Tensor(np.ones(8, np.int64))}
    experts = hp.GroupedExperts(4, 8, 8)
    own_class = type(experts).__module__
    return {
        "mesh": raised(hp.ExpertTensorParallel().apply, foreign, mesh),
        "rows": raised(experts, rows[other], counts[context.platform]),
        "counts": raised(experts, rows[context.platform], counts[other]),
        "tensor": raised(hp.distribute_tensor, rows[other], mesh, [hp.Shard(0), hp.Replicate()]),
        "modules are the platforms' own": context.platform in own_class and other in type(foreign).__module__,
    }


def wrong_plans(context):
    model = nested_model(context)
    mesh = whole_mesh(context.platform, context.world_size, 2, context.world_size // 2)["ep", "tp"]
    style = hp.ExpertTensorParallel()
    before = fingerprint(context, model.layers[0])
    results = {
        "unknown": raised(hp.parallelize_module, model, mesh, {"layers.*.expert": style}),
        "second unknown": raised(hp.parallelize_module, model, mesh, {"layers.*.experts": style, "head": style}),
        "no plan": raised(hp.parallelize_module, model, mesh, ["layers.0.experts"]),
        "twice": raised(hp.parallelize_module, model, mesh, {"layers.*.experts": style, "layers.0.experts": style}),
        "one cannot": raised(hp.parallelize_module, model, mesh, {"layers.0.experts": style, "layers.1": style}),
    }
    return results, fingerprint(context, model.layers[0]) == before


def nested_model(context, num_layers=2, dim=4, hidden_dim=8, num_experts=8):
    """layers.0.experts, layers.1.experts, ..."""
    if context.platform == "mindspore":
        from mindspore import nn

        base, container = nn.Cell, nn.CellList
    else:
        from torch import nn

        base, container = nn.Module, nn.ModuleList
    model = base()
    layers = []
    for _ in range(num_layers):
        layer = base()
        layer.experts = hp.GroupedExperts(dim, hidden_dim, num_experts)
        layers.append(layer)
    model.layers = container(layers)
    return model


def wrong_meshes_at_creation(context):
    hp.set_platform(context.platform)
    n = context.world_size
    return {
        "size": raised(hp.init_device_mesh, "cpu", (n, 2)),
        "names": raised(lambda: hp.init_device_mesh("cpu", (n,), mesh_dim_names=("ep", "tp"))),
        "same names": raised(lambda: hp.init_device_mesh("cpu", (n, 1), mesh_dim_names=("ep", "ep"))),
    }


def wrong_layouts(context):
    mesh = whole_mesh(context.platform, context.world_size, 2, context.world_size // 2)["ep", "tp"]
    tensor = context.framework.tensor(np.zeros((6, 8), np.float32), "float32")
    return {
        "number": raised(hp.distribute_tensor, tensor, mesh, [hp.Shard(0)]),
        "partial": raised(hp.distribute_tensor, tensor, mesh, [hp.Partial(), hp.Replicate()]),
        "dim": raised(hp.distribute_tensor, tensor, mesh, [hp.Shard(2), hp.Replicate()]),
        "divisible": raised(hp.distribute_tensor, tensor, mesh, [hp.Shard(0), hp.Shard(0)]),
        "placement": raised(hp.distribute_tensor, tensor, mesh, [hp.Shard(0), "tp"]),
    }
