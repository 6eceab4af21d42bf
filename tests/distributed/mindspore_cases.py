"""Cases for what MindSpore users bring along: recompute, decorated Cells, optimizers, float64."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import hyper_parallel as hp
from tests.harness import oracle, parity
from tests.harness.setting import coordinates, make_experts, mesh_for, whole_mesh


def sharded(context, ep, tp, problem):
    style = hp.ExpertTensorParallel()
    return style.apply(make_experts(context, problem), mesh_for(context, style, ep, tp))


def recomputed(context, problem):
    """Errors against one device with recompute() on the experts."""
    experts = sharded(context, 2, 2, problem)
    experts.recompute()
    evaluation = parity.evaluate(context, experts, problem, coordinates(context, 2, 2)[0])
    return parity.compare(context, evaluation, problem, 2, 2)


class PlainExperts(nn.Cell):
    """A user's cell: written for plain parameters, counts its calls, needs no change."""

    def __init__(self, dim, hidden_dim, num_experts):
        super().__init__()
        rng = np.random.default_rng(0)
        shapes = {"w1": (num_experts, hidden_dim, dim), "w2": (num_experts, dim, hidden_dim)}
        shapes["w3"] = shapes["w1"]
        for name, shape in shapes.items():
            setattr(self, name, Parameter(Tensor(rng.standard_normal(shape).astype(np.float32)), name=name))
        self.calls = 0

    def construct(self, rows, counts):
        self.calls += 1
        pieces, start = [], 0
        for e, count in enumerate(counts.asnumpy().tolist()):
            x, start = rows[start : start + count], start + count
            if count:
                gate, up = mint.matmul(x, self.w1[e].T), mint.matmul(x, self.w3[e].T)
                pieces.append(mint.matmul(mint.nn.functional.silu(gate) * up, self.w2[e].T))
        return mint.cat(pieces, 0) if pieces else rows * 1.0


def users_cell(context, problem):
    num_experts, hidden_dim, dim = problem.w1.shape
    experts = PlainExperts(dim, hidden_dim, num_experts)
    for name in ("w1", "w2", "w3"):
        context.framework.set_parameter(experts, name, getattr(problem, name))
    style = hp.ExpertTensorParallel()
    style.apply(experts, mesh_for(context, style, 2, 2))
    evaluation = parity.evaluate(context, experts, problem, coordinates(context, 2, 2)[0], with_scores=False)
    return parity.compare(context, evaluation, problem, 2, 2, with_scores=False), experts.calls


def decorated(context):
    mesh = whole_mesh("mindspore", context.world_size, 2, 2)["ep", "tp"]
    asked = []

    def current_mesh():
        asked.append(1)
        return mesh

    @hp.parallelize(hp.ExpertTensorParallel(), current_mesh)
    class Experts(hp.GroupedExperts):
        """Decorated."""

    class Below(Experts):
        pass

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.blocks = nn.CellList([Experts(6, 8, 4), Experts(6, 8, 4)])

    model = Model()
    names = [parameter.name for parameter in model.trainable_params()]
    return (
        len(asked),
        tuple(model.blocks[0].w1.shape),
        isinstance(model.blocks[0], Experts),
        tuple(Below(6, 8, 4).w1.shape),
        names,
    )


def optimizers(context, problem):
    """Three steps of the framework's optimizers on sharded experts, and of one device with the summed gradients."""
    ep_rank, _ = coordinates(context, 2, 2)
    found = {}
    makers = {
        "Adam": lambda params: nn.Adam(params, learning_rate=0.01),
        "SGD": lambda params: nn.SGD(params, learning_rate=0.1),
        "experimental AdamW": lambda params: ms.experimental.optim.AdamW(params, lr=0.01),
    }
    for key, make in makers.items():
        experts, one = sharded(context, 2, 2, problem), make_experts(context, problem)
        weights = []
        for module, ranks in ((experts, [ep_rank]), (one, [0, 1])):
            optimizer = make(module.trainable_params())
            for _ in range(3):
                per_rank = [parity.evaluate(context, module, problem, rank).parameter_gradients for rank in ranks]
                gradients = [sum(g[p.name] for g in per_rank) / 32 for p in module.trainable_params()]
                optimizer(tuple(Tensor(g.astype(np.float32)) for g in gradients))
            weights.append(
                [
                    context.framework.array(w.full_tensor() if module is experts else w)
                    for w in (module.w1, module.w2, module.w3)
                ]
            )
        moved = np.abs(weights[0][0] - problem.w1).max()
        found[key] = max(oracle.relative_error(*pair) for pair in zip(*weights)), moved
    return found


def float64(context, problem):
    """Forward in float64, whose sums over tp the backend lacks and the platform makes up for."""
    num_experts, hidden_dim, dim = problem.w1.shape
    experts = hp.GroupedExperts(dim, hidden_dim, num_experts)
    for name in ("w1", "w2", "w3"):
        setattr(experts, name, Parameter(Tensor(getattr(problem, name)), name=name))
    style = hp.ExpertTensorParallel()
    style.apply(experts, mesh_for(context, style, 2, 2))
    ep_rank, _ = coordinates(context, 2, 2)
    y = experts(Tensor(problem.x[ep_rank]), Tensor(problem.counts[ep_rank]), Tensor(problem.scores[ep_rank]))
    return str(y.dtype), oracle.relative_error(y.asnumpy(), oracle.one_device(problem).outputs[ep_rank])
