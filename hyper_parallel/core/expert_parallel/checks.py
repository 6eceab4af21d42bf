"""Checks of experts modules and of the inputs of one call. They read; they change nothing and start no collective.

Shape suffixes: R rows, E experts, H hidden size, D model size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.types import Module, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = [
    "ExpertShapes",
    "FeedForwardShapes",
    "check_ready",
    "experts_shapes",
    "feed_forward_shapes",
    "check_buffers",
    "check_fit",
    "check_inputs",
    "check_features",
    "check_output",
    "check_plain",
    "check_tokens",
    "check_counts",
    "product",
]

WEIGHTS = ("w1", "w2", "w3")
LOCAL_TENSOR = (
    "pass the local tensor of a DTensor, x.to_local(), or have torch's PrepareModuleInput do so (use_local_output=True)"
)


@dataclass(frozen=True)
class ExpertShapes:
    """Sizes of an experts module before sharding."""

    num_experts: int
    hidden_dim: int
    dim: int


@dataclass(frozen=True)
class FeedForwardShapes:
    """Sizes of a dense SwiGLU module before sharding."""

    hidden_dim: int
    dim: int


def check_ready(platform: Platform, module: Module, style: str) -> None:
    """Raise unless ``module`` is one that a style may still be applied to.

    Raises:
        TypeError: not a module of the platform.
        RuntimeError: already parallelised.
        ValueError: forward replaced on the object.
    """
    if not platform.is_module(module):
        raise TypeError(f"{style} expects a {platform.name} module, got {type(module).__qualname__}")
    earlier = platform.sharded(module)
    if earlier is not None:
        raise RuntimeError(f"{style}: this module is already parallelised by {earlier.label}; apply one style, once")
    if platform.replaced_forward(module):
        raise ValueError(f"{style}: forward was replaced on this object; apply the style before you do that")


def experts_shapes(platform: Platform, module: Module, style: str, extra_parameters: bool = False) -> ExpertShapes:
    """Return the sizes of an experts module that is ready to be sharded.

    Args:
        style: the style's name, for messages.
        extra_parameters: allow parameters beside w1, w2, w3, as long as their first dim is the expert.

    Raises:
        RuntimeError: parameters already sharded.
        ValueError: parameters missing, surplus or of other shapes.
    """
    parameters = platform.parameters(module)
    missing = [name for name in WEIGHTS if name not in parameters]
    if missing:
        raise ValueError(
            f"{style} expects parameters w1 and w3 [E, H, D] and w2 [E, D, H]; {', '.join(missing)} missing in "
            f"{type(module).__qualname__}, which has {sorted(parameters) or 'none of its own'}"
        )
    _check_whole(platform, parameters, style)
    shapes = _weight_shapes(parameters, style)
    _check_other_parameters(platform, module, parameters, style, shapes.num_experts if extra_parameters else None)
    return shapes


def feed_forward_shapes(platform: Platform, module: Module, style: str) -> FeedForwardShapes | None:
    """Return the sizes of a dense SwiGLU module with linear layers w1, w2, w3, or None if ``module`` is not one.

    Raises:
        RuntimeError: parameters already sharded.
        ValueError: layers with biases or of other shapes.
    """
    layers = {name: child for name, child in platform.named_modules(module) if name in WEIGHTS}
    if len(layers) != len(WEIGHTS) or platform.parameters(module):
        return None
    found = {f"{name}.{key}": p for name in WEIGHTS for key, p in platform.parameters(layers[name]).items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
    hidden_dim, dim = (*shapes.get("w1.weight", ()), 0, 0)[:2]
    expected = {"w1.weight": (hidden_dim, dim), "w2.weight": (dim, hidden_dim), "w3.weight": (hidden_dim, dim)}
    if shapes != expected:
        raise ValueError(f"{style} expects weights w1, w3 [H, D] and w2 [D, H] and no biases, got {shapes}")
    _check_whole(platform, found, style)
    return FeedForwardShapes(hidden_dim, dim)


def _check_whole(platform: Platform, parameters: dict[str, Any], style: str) -> None:
    sharded = [name for name, parameter in parameters.items() if platform.is_sharded(parameter)]
    if sharded:
        raise RuntimeError(f"{style}: parameters {sharded} are already laid out over a mesh; apply the style first")


def _weight_shapes(parameters: dict[str, Any], style: str) -> ExpertShapes:
    w1, w2, w3 = (tuple(parameters[name].shape) for name in WEIGHTS)
    if len(w1) != 3 or w3 != w1 or w2 != (w1[0], w1[2], w1[1]):
        raise ValueError(
            f"{style} expects w1 and w3 of shape [E, H, D] and w2 of shape [E, D, H], got w1 {w1}, w2 {w2}, w3 {w3}"
        )
    if len({parameters[name].dtype for name in WEIGHTS}) > 1:
        dtypes = ", ".join(f"{name} {parameters[name].dtype}" for name in WEIGHTS)
        raise ValueError(f"{style} expects w1, w2 and w3 of one dtype, got {dtypes}")
    if len({id(parameters[name]) for name in WEIGHTS}) < len(WEIGHTS):
        raise ValueError(f"{style}: two of w1, w2, w3 are one parameter; sharding would tear them apart")
    if 0 in w1:
        raise ValueError(f"{style} expects at least one expert, and sizes of at least 1, got w1 {w1}")
    return ExpertShapes(num_experts=w1[0], hidden_dim=w1[1], dim=w1[2])


def _check_other_parameters(
    platform: Platform, module: Module, parameters: dict[str, Any], style: str, num_experts: int | None
) -> None:
    """Parameters that the style would not shard would silently get gradients of one rank's tokens only."""
    others = [name for name in parameters if name not in WEIGHTS]
    if num_experts is not None:
        others = [name for name in others if tuple(parameters[name].shape[:1]) != (num_experts,)]
    for path, child in platform.named_modules(module):
        others += [f"{path}.{name}" for name in platform.parameters(child) if path]
    if others:
        allowed = "" if num_experts is None else f" and ones whose first dim is the expert ({num_experts})"
        raise ValueError(f"{style} shards parameters w1, w2, w3{allowed}; this module also has {others}")


def check_buffers(platform: Platform, module: Module, shapes: ExpertShapes, axes: Sequence[str], style: str) -> None:
    """Raise ``ValueError`` for a buffer that would have to be cut with the weights: left whole, its entries would meet
    other experts, or other parts of them, than they are meant for."""
    for path, child in platform.named_modules(module):
        for name, buffer in platform.buffers(child).items():
            name, shape = f"{path}.{name}".lstrip("."), tuple(buffer.shape)
            of_experts = "ep" in axes and shape[:1] == (shapes.num_experts,)
            if of_experts or ("tp" in axes and shapes.hidden_dim in shape):
                what = "num_experts" if of_experts else "hidden_dim"
                raise ValueError(
                    f"{style}: buffer {name!r} of shape {shape} has entries for {what}, but only parameters are cut; "
                    "make it a parameter (with requires_grad=False), or keep it outside of this module"
                )


def check_tokens(platform: Platform, moe: Any, x: Tensor) -> None:
    """Raise unless ``x`` is a plain tensor [..., D] for the router of a MoE layer."""
    check_plain(platform, "x", x, LOCAL_TENSOR)
    dim = getattr(moe.router, "dim", x.shape[-1] if len(x.shape) else None)  # a router of the user's need not have it
    if len(x.shape) < 2 or x.shape[-1] != dim:
        raise ValueError(f"x must have shape [..., {dim}], of two dims or more, got {tuple(x.shape)}")


def check_features(platform: Platform, x: Tensor, dim: int) -> None:
    """Raise unless ``x`` is a plain tensor [..., D] for a dense module."""
    check_plain(platform, "x", x, LOCAL_TENSOR)
    if not len(x.shape) or x.shape[-1] != dim:
        raise ValueError(f"x must have shape [..., {dim}], got {tuple(x.shape)}")


def check_plain(platform: Platform, name: str, value: Any, remedy: str) -> None:
    """Raise ``TypeError``, with what to do, unless the input ``name`` is a tensor that holds its own data."""
    if not platform.is_tensor(value):
        raise TypeError(f"{name} must be a plain {platform.name} tensor, got {_kind(value)}; {remedy}")


def product(platform: Platform, linear: Any, x: Tensor) -> Tensor:
    """``linear(x)``; a ``ValueError`` with words where it fails because x has another dtype than the weight."""
    try:
        return linear(x)
    except (RuntimeError, TypeError, ValueError) as error:
        weight = getattr(linear, "weight", None)
        if weight is None or platform.same_dtype(x, weight):
            raise
        raise ValueError(
            f"x is {x.dtype} but the weights {weight.dtype}; cast x, or use autocast where the framework has it"
        ) from error


def check_fit(platform: Platform, x_RD: Tensor, weight: Tensor) -> None:
    """Raise ``ValueError`` unless rows and an expert's weight can be multiplied: one device, one dtype."""
    if not platform.same_device(x_RD, weight):
        raise ValueError(
            f"rows are on {x_RD.device} but the experts' weights on {weight.device}; weights that were made on meta "
            "need to_empty(device=...), and then reset_parameters() or a checkpoint"
        )
    if not platform.same_dtype(x_RD, weight):
        raise ValueError(
            f"rows are {x_RD.dtype} but the experts' weights {weight.dtype}; cast one of them, or use autocast where "
            "the framework has it"
        )


def check_inputs(
    platform: Platform, shapes: ExpertShapes, x_RD: Tensor, num_tokens_per_expert_E: Tensor, scores_R: Tensor | None
) -> Tensor:
    """Check the inputs of one call on the experts of ``shapes``; see ``GroupedExperts`` for what they must be.

    Values of the counts are checked where they can be read for free; on a device they are checked when they have been
    copied to the host anyway.

    Returns:
        the counts, int64 and known to the host where they could be read: nobody needs to read them again.
    """
    for name, value in (("x", x_RD), ("num_tokens_per_expert", num_tokens_per_expert_E), ("scores", scores_R)):
        if name != "scores" or value is not None:
            remedy = "pass the local tensor of a DTensor, a dense tensor, a tensor instead of a list"
            check_plain(platform, name, value, remedy)
    if platform.same_device(x_RD, x_RD) and not platform.same_device(num_tokens_per_expert_E, num_tokens_per_expert_E):
        raise ValueError("num_tokens_per_expert is on meta and has no numbers; give it the device of x, or the host")
    if len(x_RD.shape) != 2 or x_RD.shape[1] != shapes.dim:
        raise ValueError(f"x must have shape [rows, {shapes.dim}], got {tuple(x_RD.shape)}")
    if not platform.is_integer(num_tokens_per_expert_E):
        raise ValueError(f"num_tokens_per_expert must hold integers, got {num_tokens_per_expert_E.dtype}")
    if tuple(num_tokens_per_expert_E.shape) != (shapes.num_experts,):
        raise ValueError(
            f"num_tokens_per_expert must have one entry for each of the {shapes.num_experts} experts, "
            f"got shape {tuple(num_tokens_per_expert_E.shape)}"
        )
    if scores_R is not None and not platform.is_floating(scores_R):
        raise ValueError(f"scores must be floating numbers, got {scores_R.dtype}")
    if scores_R is not None and tuple(scores_R.shape) != (x_RD.shape[0],):
        raise ValueError(f"scores must have shape [{x_RD.shape[0]}], one per row of x, got {tuple(scores_R.shape)}")
    if not platform.on_host(num_tokens_per_expert_E):
        return num_tokens_per_expert_E
    (counts,) = platform.to_host(num_tokens_per_expert_E)
    check_counts(counts, x_RD.shape[0])
    return platform.int_tensor(counts, like=x_RD)


def check_output(platform: Platform, y: Any, x: Tensor) -> Any:
    """Raise unless ``y``, which a module returned for x, is a plain tensor of the shape of x; returns it.

    Raises:
        TypeError: not a plain tensor. ValueError: another shape.
    """
    if not platform.is_tensor(y):
        raise TypeError(
            f"the module must return one tensor of the shape of x, {tuple(x.shape)}, got {_kind(y)}; return that "
            "alone, and keep what else there is, such as a loss, on the module"
        )
    if tuple(y.shape) != tuple(x.shape):
        raise ValueError(f"the module must return one row for each row of x, {tuple(x.shape)}, got {tuple(y.shape)}")
    return y


def _kind(value: Any) -> str:
    """What an object is, in words."""
    layout = str(getattr(value, "layout", "strided")).rpartition(".")[2]
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return name if layout == "strided" else f"{name} ({layout})"


def check_counts(counts: Sequence[int], num_rows: int) -> None:
    """Raise ``ValueError`` unless ``counts`` (host ints) are not negative and sum to the number of rows."""
    if counts and min(counts) < 0:
        raise ValueError(f"num_tokens_per_expert must not be negative, got {counts}")
    if sum(counts) != num_rows:
        raise ValueError(f"num_tokens_per_expert sums to {sum(counts)}, but x has {num_rows} rows")
