"""The model of cost of docs/performance.md: what one rank computes and sends, on average over the ranks.

T tokens of one ep coordinate, K experts per token, D model size, H hidden size, b bytes per number.
"""

__all__ = ["flops", "payload", "on_the_wire", "kept_bytes"]


def flops(work):
    """(forward, backward) of the experts' matrix products: 3 products forward, 6 backward, 2 flops per multiply-add."""
    shape = work.shape
    product = 2 * work.tokens * shape.top_k * shape.dim * shape.hidden_dim // work.tp
    return 3 * product, 6 * product


def payload(work, scores=False):
    """Bytes that a rank hands to collectives, by axis, as (forward, backward).

    Args:
        scores: the experts are given scores (a MoE layer with scores "inside" them).
    """
    shape, tokens, b = work.shape, work.tokens, work.itemsize
    rows = tokens * shape.top_k * shape.dim * b
    scores_bytes = tokens * shape.top_k * 4
    found = {}
    if work.ep > 1:
        counts = 8 * shape.num_experts
        found["ep"] = counts + 2 * rows + scores * scores_bytes, 2 * rows + scores * scores_bytes
    if work.tp > 1:
        summed = rows if work.layer == "experts" else tokens * shape.dim * b
        of_scores = scores_bytes if work.layer == "moe" or scores else 0
        found["tp"] = summed, summed + of_scores
    return found


def on_the_wire(work):
    """Bytes of rows that leave a rank, by axis, as (forward, backward): balanced routing, ring all-reduce."""
    sent = payload(work)
    found = {}
    if "ep" in sent:
        found["ep"] = tuple(n * (work.ep - 1) // work.ep for n in sent["ep"])
    if "tp" in sent:
        found["tp"] = tuple(2 * n * (work.tp - 1) // work.tp for n in sent["tp"])
    return found


def kept_bytes(work):
    """Bytes that the experts layer keeps from forward to backward: rows, gate, up; and the two orders if rows move."""
    shape, rows = work.shape, work.tokens * work.shape.top_k
    orders = 2 * 8 * rows if 1 < work.ep < shape.num_experts else 0
    own_rows = rows * shape.dim * work.itemsize if work.ep > 1 else 0  # with ep = 1 the rows are the caller's
    return own_rows + 2 * rows * shape.hidden_dim // work.tp * work.itemsize + orders
