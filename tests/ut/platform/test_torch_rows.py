"""Row kernels of torch against float64, in every dtype, with gradients as autograd hands them over."""

import numpy as np
import pytest

from tests.conftest import require
from tests.harness.oracle import relative_error

LIMITS = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}
# The last is wider than a block of rows.
SHAPES = [(0, 6), (1, 1), (7, 6), (600, 512), (3, 300_000)]


@pytest.fixture(scope="module", autouse=True)
def torch():
    require("torch")
    import torch

    return torch


def draw(torch, shape, dtype, seed):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape)).to(getattr(torch, dtype))


def gradients(torch, kind, y):
    """A gradient for y: its own memory, another layout, or one number for all, as ``sum()`` gives it."""
    if kind == "expanded":
        return torch.ones(1, 1, dtype=y.dtype).expand_as(y)
    dense = draw(torch, y.shape, "float64", 5).to(y.dtype)
    return dense if kind == "dense" else dense.t().contiguous().t()


@pytest.mark.parametrize("grad", ["dense", "transposed", "expanded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("scores_dtype", ["float32", "float64"])
def test_scale_rows(torch, dtype, scores_dtype, shape, grad):
    from hyper_parallel.platform.torch.rows import scale_rows

    x, scores = (draw(torch, shape, dtype, 1), draw(torch, shape[:1], scores_dtype, 2).abs())
    leaves = x.requires_grad_(), scores.requires_grad_()
    y = scale_rows(*leaves)
    dy = gradients(torch, grad, y)
    y.backward(dy)
    exact_x, exact_scores, exact_dy = (value.detach().double() for value in (x, scores, dy))
    assert (y.dtype, x.grad.dtype, scores.grad.dtype) == (x.dtype, x.dtype, scores.dtype)
    limit = LIMITS[dtype]
    assert relative_error(y.detach().double(), exact_x * exact_scores.unsqueeze(1)) < limit
    assert relative_error(x.grad.double(), exact_dy * exact_scores.unsqueeze(1)) < limit
    # Formed in the wider dtype of the two: 16-bit rows cost the scores' gradient nothing.
    of_scores = LIMITS["float64" if scores_dtype == "float64" else "float32"]
    assert relative_error(scores.grad.double(), (exact_dy * exact_x).sum(1)) < of_scores


@pytest.mark.parametrize("grad", ["dense", "transposed", "expanded"])
@pytest.mark.parametrize("num_rows,copies", [(0, 2), (5, 1), (5, 3), (2, 9)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_permute_and_unpermute(torch, dtype, num_rows, copies, grad):
    from hyper_parallel.platform.torch.rows import permute, unpermute

    order = torch.tensor(np.random.default_rng(3).permutation(num_rows * copies))
    inverse = torch.argsort(order)
    token = order // copies

    x = draw(torch, (num_rows, 6), dtype, 1).requires_grad_()
    y = permute(x, order, inverse, copies)
    dy = gradients(torch, grad, y)
    y.backward(dy)
    summed = torch.zeros(num_rows, 6, dtype=torch.float64).index_add(0, token, dy.double())
    assert torch.equal(y, x[token]) and relative_error(x.grad.double(), summed) < LIMITS[dtype]

    rows = draw(torch, (num_rows * copies, 6), dtype, 2).requires_grad_()
    y = unpermute(rows, order, inverse, copies)
    dy = gradients(torch, grad, y)
    y.backward(dy)
    summed = torch.zeros(num_rows, 6, dtype=torch.float64).index_add(0, token, rows.detach().double())
    assert torch.equal(rows.grad, dy[token]) and relative_error(y.detach().double(), summed) < LIMITS[dtype]
