"""The framework adapter, inside ranks because the parent process imports no framework."""

import numpy as np
import pytest

from tests.harness.oracle import loss, loss_gradient, relative_error

RANDOM = np.random.default_rng(3)
X, TARGET = RANDOM.integers(-8, 8, (2, 4, 3)) / 4  # exact in float32 too
WEIGHT = np.array([0.5, -1.25, 3.0])


def scale_module(context):
    """y = x * weight * fixed, where `fixed` is ones and frozen."""
    fixed = context.framework.tensor(np.ones(3))
    if context.platform == "torch":
        import torch

        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros_like(fixed))
        module.fixed = torch.nn.Parameter(fixed, requires_grad=False)
    else:
        from mindspore import Parameter, nn

        module = nn.Cell()
        module.weight = Parameter(fixed * 0, name="weight")
        module.fixed = Parameter(fixed, name="fixed", requires_grad=False)
    return module


def evaluate_twice(context):
    framework, module = context.framework, scale_module(context)
    framework.set_parameter(module, "weight", WEIGHT)

    def function(x, counts, target):
        y = x * module.weight * module.fixed
        return framework.loss(y, target), y

    inputs = [framework.tensor(X), framework.int_tensor([1, 3]), framework.tensor(TARGET)]
    evaluations = [framework.value_and_gradients(function, inputs, module) for _ in range(2)]
    parameters = {name: framework.array(value) for name, value in framework.parameters(module).items()}
    return evaluations, parameters, framework.tolerance


def evaluate_without_rows(context):
    framework = context.framework
    nothing = framework.tensor(np.zeros((0, 3)))
    return framework.value_and_gradients(lambda x: (framework.loss(x * 2, nothing), x * 2), [nothing])


def evaluate_weights_only(context):
    framework, module = context.framework, scale_module(context)

    def function(counts):
        return framework.total(module.weight * 3), module.weight * 3

    return framework.value_and_gradients(function, [framework.int_tensor([1])], module)


def evaluate_after_error(context):
    framework = context.framework

    def fails(x):
        raise ValueError("inside the differentiated function")

    x = framework.tensor(X)
    try:
        framework.value_and_gradients(fails, [x])
    except ValueError:
        return framework.array(x[1]), framework.value_and_gradients(lambda x: (framework.total(x * x), x), [x])


def convert(context):
    framework, source = context.framework, np.ones(2)
    tensor = framework.tensor(source)
    source[:] = 5
    array = framework.array(tensor)
    array[:] = 7
    return {
        "copy": framework.array(tensor),
        "float32": framework.array(framework.tensor(source, "float32")),
        "bfloat16": framework.array(framework.tensor(source, "bfloat16")),
        "float16": framework.array(framework.tensor(source, "float16")),
        "int32": framework.array(framework.tensor(np.arange(2, dtype=np.int32))),
        "int64": framework.array(framework.int_tensor([0, 1])),
    }, framework.dtype


def set_wrong_shape(context):
    try:
        context.framework.set_parameter(scale_module(context), "weight", np.ones((3, 1)))
    except ValueError as error:
        return str(error)


def evaluate_sharded(context):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    module = torch.nn.Module()
    mesh = init_device_mesh("cpu", (context.world_size,))
    module.weight = torch.nn.Parameter(distribute_tensor(torch.arange(8.0, dtype=torch.float64), mesh, [Shard(0)]))

    def function(x):
        y = x * module.weight.to_local()
        return y.sum(), y

    evaluation = context.framework.value_and_gradients(function, [context.framework.tensor([2.0, 3.0])], module)
    return context.framework.array(context.framework.parameters(module)["weight"]), evaluation


def test_value_and_gradients(pool):
    y = X * WEIGHT
    slope = loss_gradient(y, TARGET)
    for evaluations, parameters, tolerance in pool.run(evaluate_twice):
        assert list(parameters) == ["weight", "fixed"]
        np.testing.assert_array_equal(parameters["weight"], WEIGHT)
        for evaluation in evaluations:
            assert evaluation.loss == pytest.approx(loss(y, TARGET), rel=tolerance)
            assert relative_error(evaluation.output, y) < tolerance
            of_x, of_counts, of_target = evaluation.input_gradients
            assert of_counts is None
            assert relative_error(of_x, slope * WEIGHT) < tolerance
            assert relative_error(of_target, slope) < tolerance
            assert list(evaluation.parameter_gradients) == ["weight"]
            assert relative_error(evaluation.parameter_gradients["weight"], (slope * X).sum(axis=0)) < tolerance


def test_no_rows(pool):
    for evaluation in pool.run(evaluate_without_rows):
        assert evaluation.loss == 0
        assert evaluation.output.shape == evaluation.input_gradients[0].shape == (0, 3)
        assert evaluation.parameter_gradients == {}


def test_gradients_of_weights_only(pool):
    for evaluation in pool.run(evaluate_weights_only):
        assert evaluation.input_gradients == [None]
        np.testing.assert_array_equal(evaluation.parameter_gradients["weight"], np.full(3, 3.0))


def test_the_framework_works_after_an_error_inside_a_differentiated_function(pool):
    for row, evaluation in pool.run(evaluate_after_error):
        np.testing.assert_array_equal(row, X[1])
        assert relative_error(evaluation.input_gradients[0], 2 * X) < 1e-6


def test_conversions_copy_and_keep_types(pool):
    for arrays, dtype in pool.run(convert):
        for name, array in arrays.items():
            assert str(array.dtype) == {"copy": dtype, "bfloat16": "float32"}.get(name, name)
        assert arrays["copy"].tolist() == [1, 1] and arrays["bfloat16"].tolist() == [5, 5]


def test_a_parameter_keeps_its_shape(pool):
    assert pool.run(set_wrong_shape) == ["weight has shape (3,), got values of shape (3, 1)"] * pool.world_size


def test_sharded_torch_parameters_are_local(torch_pool):
    for rank, (local, evaluation) in enumerate(torch_pool.run(evaluate_sharded)):
        np.testing.assert_array_equal(local, [2 * rank, 2 * rank + 1])
        np.testing.assert_array_equal(evaluation.parameter_gradients["weight"], [2, 3])
