"""The library's model of cost (``hyper_parallel.plan.layer``), for a work of the benchmark."""

from hyper_parallel.plan import layer as formulas

__all__ = ["layer_of", "flops", "payload", "on_the_wire", "kept_bytes"]


def layer_of(work, style="ExpertTensorParallel"):
    """The work as the formulas take it."""
    shape = work.shape
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k, "dim": shape.dim, "hidden_dim": shape.hidden_dim}
    return formulas.MoELayer(style, work.ep, work.tp, work.tokens, itemsize=work.itemsize, **sizes)


def flops(work):
    """(forward, backward) of the experts' matrix products."""
    return formulas.flops(layer_of(work))


def payload(work, scores=False):
    """Bytes that a rank hands to collectives, by axis, as (forward, backward).

    Args:
        scores: the experts are given scores (a MoE layer with scores "inside" them).
    """
    return formulas.payload(layer_of(work), bare=work.layer == "experts", scores=scores)


def on_the_wire(work):
    """Bytes that leave a rank, by axis, as (forward, backward): balanced routing, ring all-reduce."""
    degrees = {"ep": work.ep, "tp": work.tp}
    factors = {"ep": 1, "tp": 2}
    return {
        axis: tuple(factors[axis] * n * (degrees[axis] - 1) // degrees[axis] for n in sizes)
        for axis, sizes in payload(work).items()
    }


def kept_bytes(work):
    """Bytes that the experts layer keeps from forward to backward: rows, gate, up; and the two orders if rows move."""
    return formulas.kept_bytes(layer_of(work), bare=True)
