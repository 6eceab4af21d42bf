"""Replicas that start from the same weights."""

from hyper_parallel.core.types import Mesh, Module
from hyper_parallel.platform import get_platform
from hyper_parallel.training.gradients import buckets
from hyper_parallel.training.span import Span

__all__ = ["synchronize_parameters"]


def synchronize_parameters(module: Module, mesh: Mesh, how: str = "check") -> None:
    """See that ranks which hold the same part of a trainable parameter hold the same numbers.

    ``apply`` lays out the weights of the first rank of *its* mesh, so the replicas of ``mesh["ep", "tp"]`` along dp
    each have their own, and parameters that no style touches (router, attention, norms) are as each rank drew them.
    Call this on every rank after ``apply`` and before the optimizer is made. Ranks hold the same part of a parameter
    if they differ only on axes of ``mesh`` over which it is not sharded; the first of them is what counts.

    Args:
        module: the model.
        mesh: the axes over which there are replicas; usually the whole mesh, tp included.
        how: "check": raise where numbers differ. "broadcast": give all ranks the numbers of the first.

    Raises:
        ValueError: on every rank of ``mesh``: parameters differ ("check"), with their names; NaN equals NaN.
    """
    if how not in ("check", "broadcast"):
        raise ValueError(f'how must be "check" or "broadcast", got {how!r}')
    platform = get_platform(module)
    verbs, span = platform.gradients(), Span.of(platform, mesh)
    trainable = verbs.trainable(module)
    names, parameters = [name for name, _ in trainable], [parameter for _, parameter in trainable]
    values = verbs.local_values(parameters)
    entries = [(axes, i, values[i]) for i, p in enumerate(parameters) if (axes := span.shared_axes(p))]
    differ = [0] * len(parameters)
    for axes, indices in buckets(entries):
        first = all(span.place[axis] == 0 for axis in axes)
        # A sum of zeros and the first rank's numbers: exact, in the one collective that every backend has.
        sent = [verbs.zeros_like(values[i]) + values[i] if first else verbs.zeros_like(values[i]) for i in indices]
        received = verbs.sum_flat(sent, span.group(axes), 1, "synchronize_parameters: the first rank's values")
        for i, value in zip(indices, received):
            if how == "broadcast":
                verbs.set_local_value(parameters[i], value)
            else:
                differ[i] = int(not verbs.same(values[i], value))
    if how == "check" and span.axes:
        name = "synchronize_parameters: agreement of the ranks"
        differ = verbs.largest(differ, span.group(span.axes), mesh.device_type, name)
        wrong = [name for name, other in zip(names, differ) if other]
        if wrong:
            raise ValueError(
                f"replicas hold different values of {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''} "
                f"({len(wrong)} of {len(names)} parameters); seed every rank alike before the model is made, or call "
                'synchronize_parameters(module, mesh, how="broadcast")'
            )
