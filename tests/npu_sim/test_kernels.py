"""The library's npu kernels on one simulated device, against float64 and against torch's own operators."""

import logging

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.torch import PLATFORM, npu_operators
from tests.harness import oracle

# bfloat16 keeps 8 bits of a number, float16 11; every value here is rounded a few times on its way.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
COUNTS = {"uneven": [5, 0, 9, 2], "one has all": [0, 0, 7, 0], "no rows": [0, 0, 0, 0]}


@pytest.fixture(autouse=True)
def _fresh_choice():
    npu_operators.runs.cache_clear()


def run(device, problem, dtype, scores_dtype=None):
    """Output, and gradients of x, scores and weights, of the experts on the device for the oracle's loss."""
    make = dict(device=device, dtype=dtype)
    x, w1, w2, w3 = (
        torch.tensor(v, **make).requires_grad_() for v in (problem.x[0], problem.w1, problem.w2, problem.w3)
    )
    scores = torch.tensor(problem.scores[0], device=device, dtype=scores_dtype or dtype).requires_grad_()
    y = PLATFORM.swiglu_experts(x, w1, w2, w3, torch.tensor(problem.counts[0], device=device), scores)
    (y + torch.tensor(problem.targets[0], **make)).square().sum().div(2).backward()
    return {"output": y, "x": x.grad, "scores": scores.grad, "w1": w1.grad, "w2": w2.grad, "w3": w3.grad}


def against_float64(problem, found):
    expected = oracle.one_device(problem)
    expected = {
        "output": expected.outputs[0],
        "x": expected.x_gradients[0],
        "scores": expected.score_gradients[0],
        "w1": expected.w1_gradient,
        "w2": expected.w2_gradient,
        "w3": expected.w3_gradient,
    }
    return {name: oracle.relative_error(found[name].detach().cpu().double(), expected[name]) for name in expected}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts(npu, measured, dtype, counts):
    problem = oracle.make_problem(1, 4, 6, 8, counts=[counts])
    found = run(npu, problem, dtype)
    assert all(value.device == npu and value.dtype == dtype for value in found.values())
    errors = against_float64(problem, found)
    measured(errors, dtype)
    assert max(errors.values()) < LIMITS[dtype], errors
    if dtype != torch.float32:  # no worse than torch's own operators in the same dtype on the CPU
        plain = against_float64(problem, run("cpu", problem, dtype))
        assert all(errors[name] < 1.5 * plain[name] + 1e-3 for name in errors), (errors, plain)


def test_scores_keep_their_dtype(npu):
    problem = oracle.make_problem(1, 4, 6, 8)
    found = run(npu, problem, torch.bfloat16, scores_dtype=torch.float32)
    assert found["output"].dtype == torch.bfloat16 and found["scores"].dtype == torch.float32
    assert max(against_float64(problem, found).values()) < LIMITS[torch.bfloat16]


def test_gradient_of_an_expert_without_rows(npu, monkeypatch):
    """The operator leaves such a block unwritten, which the simulation shows as NaN; the library must clear it."""
    problem = oracle.make_problem(1, 4, 6, 8, counts=[[5, 0, 9, 2]])
    for name in ("w1", "w2", "w3"):
        grad = run(npu, problem, torch.bfloat16)[name]
        assert (grad[1] == 0).all() and grad.isfinite().all()
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda self, *_: self)
    assert run(npu, problem, torch.bfloat16)["w2"][1].isnan().all()


def test_odd_strides(npu):
    """Transposed rows and weights, and the gradient of a sum, whose strides are 0."""
    x, w1, w2, w3 = (torch.randn(shape, device=npu).bfloat16() for shape in [(6, 9), (3, 6, 4), (3, 4, 6), (3, 6, 4)])
    counts = torch.tensor([4, 0, 5], device=npu)
    leaves = [value.mT.requires_grad_() for value in (x, w1, w2, w3)]
    same = [value.detach().contiguous().requires_grad_() for value in leaves]
    assert not any(leaf.is_contiguous() for leaf in leaves)
    for inputs in (leaves, same):
        PLATFORM.swiglu_experts(*inputs, counts, None).sum().backward()
    for a, b in zip(leaves, same):
        assert torch.equal(a.grad, b.grad)


def test_frozen_inputs_get_no_gradient(npu):
    shapes = [(9, 6), (3, 4, 6), (3, 6, 4), (3, 4, 6)]
    for trained in range(4):
        inputs = [torch.randn(shape, device=npu).bfloat16() for shape in shapes]
        inputs[trained].requires_grad_()
        PLATFORM.swiglu_experts(*inputs, torch.tensor([4, 0, 5], device=npu), None).sum().backward()
        assert [value.grad is not None for value in inputs] == [i == trained for i in range(4)]


class HostCopies(TorchDispatchMode):
    """Lists the operators that bring values from the device to the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        from_npu = any(isinstance(arg, torch.Tensor) and arg.device.type == "npu" for arg in args)
        to_host = isinstance(result, (int, float, bool)) or (isinstance(result, torch.Tensor) and result.is_cpu)
        if from_npu and to_host:
            self.seen.append(str(function))
        return result


def host_copies(npu, dtype):
    inputs = [torch.randn(s, device=npu).to(dtype).requires_grad_() for s in [(9, 6), (3, 4, 6), (3, 6, 4), (3, 4, 6)]]
    counts = torch.tensor([4, 0, 5], device=npu)
    with HostCopies() as copies:
        PLATFORM.swiglu_experts(*inputs, counts, None).sum().backward()
    return copies.seen


def test_counts_stay_on_the_device(npu):
    assert not host_copies(npu, torch.bfloat16)
    assert host_copies(npu, torch.float32)  # the loop over experts must know them: the test sees copies


def test_what_runs_is_logged_once(npu, caplog):
    caplog.set_level(logging.INFO, "hyper_parallel")
    for dtype, num_experts in [(torch.bfloat16, 4), (torch.bfloat16, 4), (torch.float32, 4), (torch.bfloat16, 1)]:
        problem = oracle.make_problem(1, num_experts, 6, 8)
        assert max(against_float64(problem, run(npu, problem, dtype)).values()) < LIMITS[dtype]
    assert [record.getMessage() for record in caplog.records if record.name == "hyper_parallel"] == [
        "npu, torch.bfloat16: npu_grouped_matmul",
        "npu, torch.float32: torch's own operators in place of npu_grouped_matmul: "
        "it is used for torch.float16 and torch.bfloat16",
        "npu, torch.bfloat16: torch's own operators in place of npu_grouped_matmul: "
        "it does not take the counts of one expert alone",
    ]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_tokens,copies", [(5, 1), (5, 3), (0, 2)])
def test_permute_and_unpermute(npu, dtype, num_tokens, copies):
    random = np.random.default_rng(0)
    x = torch.tensor(random.standard_normal((num_tokens, 6)), dtype=dtype, device=npu).requires_grad_()
    order = torch.tensor(random.permutation(num_tokens * copies), device=npu)
    inverse = torch.argsort(order)
    grad = torch.tensor(random.standard_normal((num_tokens * copies, 6)), dtype=dtype, device=npu)
    y = PLATFORM.permute(x, order, inverse, copies)
    y.backward(grad)
    assert torch.equal(y, x[order // copies])
    summed = grad.cpu().double()[inverse.cpu()].reshape(num_tokens, copies, 6).sum(1)
    assert oracle.relative_error(x.grad.cpu().double(), summed) < LIMITS[dtype]

    rows = grad.clone().requires_grad_()
    y = PLATFORM.unpermute(rows, order, inverse, copies)
    y.backward(x.detach())
    assert oracle.relative_error(y.detach().cpu().double(), summed) < LIMITS[dtype]
    assert torch.equal(rows.grad, x.detach()[order // copies])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 4), (0, 4)])
def test_dense_swiglu(npu, dtype, shape):
    gate, up = (torch.randn(shape, device=npu).to(dtype).requires_grad_() for _ in range(2))
    y = PLATFORM.swiglu(gate, up)
    y.sum().backward()
    exact = [value.detach().cpu().double().requires_grad_() for value in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    expected.sum().backward()
    for found, wanted in [(y, expected), (gate.grad, exact[0].grad), (up.grad, exact[1].grad)]:
        assert oracle.relative_error(found.detach().cpu().double(), wanted.detach()) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("learns", ["weight", "rows"])
def test_products_of_adapters(npu, dtype, counts, learns):
    """Rows times narrow weights of their experts, of which only one side may learn, against float64."""
    random = np.random.default_rng(3)
    arrays = [random.standard_normal(shape) for shape in ((sum(counts), 6), (4, 3, 6), (sum(counts), 3))]
    groups = np.repeat(np.arange(4), counts)

    def products(x, w, grad, counts):
        x.requires_grad_(learns == "rows"), w.requires_grad_(learns == "weight")
        y = PLATFORM.grouped_linear(x, w, counts)
        y.backward(grad.to(y.dtype))
        return y, x.grad if learns == "rows" else w.grad

    found = products(*(torch.tensor(a, device=npu, dtype=dtype) for a in arrays), torch.tensor(counts, device=npu))
    x, w, grad = (torch.tensor(a, dtype=dtype).double() for a in arrays)
    y = (x[:, None] @ w[groups].mT)[:, 0] if len(groups) else torch.zeros(0, 3).double()
    if learns == "rows":
        gradient = (grad[:, None] @ w[groups])[:, 0] if len(groups) else torch.zeros(0, 6).double()
    else:
        gradient = torch.stack([grad[groups == e].mT @ x[groups == e] for e in range(4)])
    for mine, expected in zip(found, (y, gradient)):
        assert mine.device == npu and mine.dtype == dtype
        if expected.norm() > 0:
            assert oracle.relative_error(mine.detach().cpu().double(), expected) < LIMITS[dtype]
        else:
            assert mine.shape == expected.shape and not mine.abs().sum()
