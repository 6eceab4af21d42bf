"""What one MoE layer costs on one rank: flops, what it hands to every collective, and what it keeps for backward.

These are the formulas of docs/performance.md. The planner, the benchmark and the document use them from here, and
tests hold them against real ranks. Letters: T tokens of one (dp, ep) coordinate, K experts per token, E experts, D
model size, H hidden size of an expert, M tokens sent where each is sent once, b bytes per number. Routing is balanced,
all choices of experts equally likely, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb

__all__ = ["STYLES", "Collective", "MoELayer", "collectives", "flops", "kept_bytes", "payload", "shared_kept_bytes"]

STYLES = (
    "ExpertParallel",
    "TensorParallel",
    "ExpertTensorParallel",
    "SplitExpertTensorParallel",
    "DedupExpertTensorParallel",
)
SCORE_BYTES = 4  # scores are fp32, whatever the rows are
INDEX_BYTES = 8  # orders, counts and ids are int64
FIELDS = 4  # integers for every rank, beside its counts, on what a rank is about to send


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer on one rank.

    Attributes:
        style: the name of one of the five styles of the library.
        num_tokens: T, tokens of this rank's (dp, ep) coordinate.
        itemsize: b.
        shared_hidden_dim: hidden size of the shared experts together, split over tp by ``TensorParallel``.
        arriving: rows that arrive at this rank's experts, relative to balanced routing.
        sequence_parallel: the layer takes and returns its tokens cut over tp (``MoESequenceParallel``).
    """

    style: str
    ep: int
    tp: int
    num_tokens: int
    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int
    itemsize: int
    shared_hidden_dim: int = 0
    arriving: float = 1.0
    sequence_parallel: bool = False

    @property
    def cuts_tokens(self) -> bool:
        """Whether a tp rank holds a share of the tokens around the layer."""
        return self.sequence_parallel and self.tp > 1

    @property
    def own_tokens(self) -> int:
        """Tokens that this rank holds around the layer: T, or T/tp, rounded up."""
        return -(-self.num_tokens // self.tp) if self.cuts_tokens else self.num_tokens

    @property
    def dedups(self) -> bool:
        """Whether a token travels once to every rank that it needs; with one ep rank the style is the exact one."""
        return self.style == "DedupExpertTensorParallel" and self.ep > 1

    @property
    def splits(self) -> bool:
        """Whether each tp rank routes a share of the tokens; with one tp rank the style is the exact one."""
        return self.style == "SplitExpertTensorParallel" and self.tp > 1

    @property
    def rows(self) -> int:
        """R = T K: rows that leave one (dp, ep) coordinate, all tp ranks together."""
        return self.num_tokens * self.top_k

    @property
    def arriving_rows(self) -> int:
        """Rows at this rank's experts."""
        return round(self.rows * self.arriving)

    @property
    def sent_tokens(self) -> int:
        """Tokens that a rank sends where each is sent once to every rank it needs.

        T times the expected number of ranks that K distinct experts lie on, all choices of K equally likely:
        ep (1 - C(E - E/ep, K) / C(E, K)).
        """
        num_experts, local = self.num_experts, self.num_experts // self.ep
        missing = Fraction(comb(num_experts - local, self.top_k), comb(num_experts, self.top_k))
        return round(self.num_tokens * self.ep * (1 - missing))


@dataclass(frozen=True)
class Collective:
    """What one rank hands to one collective.

    Attributes:
        axis: "ep" or "tp". when: "forward" or "backward".
        kind: "all-to-all", "all-reduce", "all-gather" or "reduce-scatter"; of uneven pieces these two are all-to-alls.
        what: "rows", "sums" (of tokens or rows over tp), "tokens" (gathered over tp), "scores", "counts" or "ids".
        payload: bytes of the tensor that is handed over, what stays on the rank included.
        formula: how the payload comes about.
    """

    axis: str
    when: str
    kind: str
    what: str
    payload: int
    formula: str


def flops(layer: MoELayer) -> tuple[int, int]:
    """(forward, backward) of the routed experts: 3 products forward, 6 backward, 2 flops per multiply-add."""
    product = 2 * layer.arriving_rows * layer.dim * layer.hidden_dim // layer.tp
    return 3 * product, 6 * product


def collectives(layer: MoELayer, bare: bool = False, scores: bool = True) -> tuple[Collective, ...]:
    """Every collective of one forward and one backward of the layer, on this rank.

    Args:
        bare: the experts alone, on rows, outside a MoE layer: sums over tp are of rows.
        scores: the experts are given scores (a MoE layer with ``score_position="inside"``).
    """
    if layer.dedups and not bare:
        found = _dedup(layer)
    elif layer.splits and not bare:
        return tuple(_split(layer))
    else:
        found = _exact(layer, scores) if layer.ep > 1 else []
    if layer.tp > 1:
        found += _tokens(layer) if layer.cuts_tokens and not bare else _sums(layer, bare)
    if layer.tp > 1 and (scores or not bare):
        size = SCORE_BYTES * (layer.arriving_rows if bare else layer.rows)
        found.append(Collective("tp", "backward", "all-reduce", "scores", size, "4 T K"))
    return tuple(found)


def payload(layer: MoELayer, bare: bool = False, scores: bool = True) -> dict[str, tuple[int, int]]:
    """Bytes that a rank hands to collectives, by axis, as (forward, backward)."""
    found: dict[str, tuple[int, int]] = {}
    for one in collectives(layer, bare, scores):
        forward, backward = found.get(one.axis, (0, 0))
        is_forward = one.when == "forward"
        found[one.axis] = forward + is_forward * one.payload, backward + (not is_forward) * one.payload
    return found


def _both(axis: str, kind: str, what: str, size: int, formula: str, back: int | None = None) -> list[Collective]:
    """A collective and its gradient, of the same size where nothing else is said."""
    sizes = {"forward": size, "backward": size if back is None else back}
    return [Collective(axis, when, kind, what, n, formula) for when, n in sizes.items()]


def _exact(layer: MoELayer, scores: bool) -> list[Collective]:
    out, back = layer.rows * layer.dim * layer.itemsize, layer.arriving_rows * layer.dim * layer.itemsize
    counts = INDEX_BYTES * (layer.num_experts + FIELDS * layer.ep)
    found = [Collective("ep", "forward", "all-to-all", "counts", counts, "8 (E + 4 ep)")]
    found += _both("ep", "all-to-all", "rows", out, "T K D b: dispatch", back)
    found += _both("ep", "all-to-all", "rows", back, "T K D b: combine", out)
    if scores:
        sizes = SCORE_BYTES * layer.rows, SCORE_BYTES * layer.arriving_rows
        found += _both("ep", "all-to-all", "scores", sizes[0], "4 T K", sizes[1])
    return found


def _sums(layer: MoELayer, bare: bool) -> list[Collective]:
    """One sum over tp each way: of the layer's tokens, or of the rows at bare experts."""
    number, letters = (layer.arriving_rows, "T K D b") if bare else (layer.num_tokens, "T D b")
    return _both("tp", "all-reduce", "sums", number * layer.dim * layer.itemsize, letters)


def _tokens(layer: MoELayer) -> list[Collective]:
    """Tokens cut over tp: gathered at the layer's start, sums handed out at its end; backward the other way round.

    A layer that splits its tokens over tp itself hands out its own share, and has a sum for a shared expert only.
    """
    share, whole = (n * layer.dim * layer.itemsize for n in (layer.own_tokens, layer.tp * layer.own_tokens))
    integers = INDEX_BYTES * (2 + FIELDS) * layer.tp
    found = [Collective("tp", "forward", "all-to-all", "counts", integers, "8 (2 + 4) tp: sizes")]
    if layer.splits and not layer.shared_hidden_dim:
        return [*found, Collective("tp", "forward", "all-to-all", "tokens", whole, "T D b: gather")]
    return [
        *found,
        Collective("tp", "forward", "all-gather", "tokens", share, "T/tp D b: gather"),
        Collective("tp", "forward", "reduce-scatter", "sums", whole, "T D b: sums"),
        Collective("tp", "backward", "all-gather", "tokens", share, "T/tp D b: gradient of the output"),
        Collective("tp", "backward", "reduce-scatter", "sums", whole, "T D b: gradient of the input"),
    ]


def _dedup(layer: MoELayer) -> list[Collective]:
    sent, arrived = layer.sent_tokens, round(layer.sent_tokens * layer.arriving)
    of_token, of_scores = layer.dim * layer.itemsize, layer.top_k * SCORE_BYTES
    counts = INDEX_BYTES * (layer.num_experts + (1 + FIELDS) * layer.ep)
    ids = INDEX_BYTES * layer.top_k * sent
    found = [
        Collective("ep", "forward", "all-to-all", "counts", counts, "8 (E + 5 ep)"),
        Collective("ep", "forward", "all-to-all", "ids", ids, "8 M K"),
    ]
    found += _both("ep", "all-to-all", "rows", sent * of_token, "M D b: dispatch", arrived * of_token)
    found += _both("ep", "all-to-all", "rows", arrived * of_token, "M D b: combine", sent * of_token)
    return found + _both("ep", "all-to-all", "scores", sent * of_scores, "4 M K", arrived * of_scores)


def _split(layer: MoELayer) -> list[Collective]:
    """Over ep a share of the tokens; over tp all arrived rows, gathered before the experts, their sums handed back."""
    tp, of_row = layer.tp, layer.dim * layer.itemsize
    share = -(-layer.num_tokens // tp) * layer.top_k
    arrived = round(share * layer.arriving)
    counts = INDEX_BYTES * (layer.num_experts + FIELDS * layer.ep)
    found = []
    if layer.ep > 1:
        found.append(Collective("ep", "forward", "all-to-all", "counts", counts, "8 (E + 4 ep)"))
        found += _both("ep", "all-to-all", "rows", share * of_row, "T/tp K D b: dispatch", arrived * of_row)
        found += _both("ep", "all-to-all", "rows", arrived * of_row, "T/tp K D b: combine", share * of_row)
        found += _both("ep", "all-to-all", "scores", share * SCORE_BYTES, "4 T/tp K", arrived * SCORE_BYTES)
    found.append(Collective("tp", "forward", "all-to-all", "counts", tp * counts, "8 (E + 4 ep) tp"))
    found += _both("tp", "all-to-all", "rows", tp * arrived * of_row, "T K D b: gather")
    found += _both("tp", "all-to-all", "rows", tp * arrived * of_row, "T K D b: scatter of sums")
    found += _both("tp", "all-to-all", "scores", tp * arrived * SCORE_BYTES, "4 T K")
    tokens = tp * -(-layer.num_tokens // tp)
    scores = tokens * layer.top_k * SCORE_BYTES
    found.append(Collective("tp", "backward", "all-to-all", "scores", scores, "4 T K: gradient"))
    if layer.cuts_tokens:
        return found + _tokens(layer)
    found += [
        Collective("tp", "forward", "all-to-all", "sums", tokens * of_row, "T D b: output"),
        Collective("tp", "backward", "all-to-all", "sums", tokens * of_row, "T D b: gradient"),
    ]
    if layer.shared_hidden_dim:  # The layer leaves the sum to the style; so the shared expert makes its own.
        size = layer.num_tokens * of_row
        found += _both("tp", "all-reduce", "sums", size, "T D b: shared expert")
    return found


def kept_bytes(layer: MoELayer, bare: bool = False) -> int:
    """Bytes that the layer keeps from forward to backward, without its input and its output.

    Args:
        bare: the experts alone, without scores; with one ep rank their rows are the caller's.
    """
    rows, b = layer.arriving_rows, layer.itemsize
    gate_and_up = 2 * rows * (layer.hidden_dim // layer.tp) * b
    at_experts = rows * layer.dim * b
    moved = layer.ep > 1 or layer.splits
    reordered = moved and (layer.ep < layer.num_experts or layer.splits)
    # The two orders, and the counts of this rank's experts, which come in the same tensor.
    orders = INDEX_BYTES * (2 * rows + layer.num_experts // layer.ep) if reordered else 0
    if bare:
        return gate_and_up + orders + (at_experts if moved else 0)
    # Router: probabilities [T, E], the ids, the counts, and the two orders of the tokens' rows.
    share = layer.rows // layer.tp if layer.splits else layer.rows
    router = SCORE_BYTES * layer.num_tokens * layer.num_experts + INDEX_BYTES * (layer.rows + layer.num_experts)
    kept = at_experts + gate_and_up + SCORE_BYTES * rows + router + shared_kept_bytes(layer)
    if layer.cuts_tokens:  # the gathered tokens, which elsewhere are the layer's input
        kept += layer.num_tokens * layer.dim * b
    if layer.dedups:
        return kept + _kept_for_copies(layer)
    return kept + orders + 2 * INDEX_BYTES * share


def _kept_for_copies(layer: MoELayer) -> int:
    """Where a token travels once: positions of the sent tokens; of the arrived ones the order, with its whole sort; the
    tokens of the rows; and the outputs of both sums of rows into tokens, which torch's ``index_add`` keeps."""
    rows, arrived = layer.arriving_rows, round(layer.sent_tokens * layer.arriving)
    indices = layer.sent_tokens + arrived * layer.top_k + rows
    return INDEX_BYTES * indices + (rows + layer.sent_tokens) * layer.dim * layer.itemsize


def shared_kept_bytes(layer: MoELayer) -> int:
    """Of the shared expert: gate, up and their product, which the last linear layer keeps."""
    return 3 * layer.num_tokens * (layer.shared_hidden_dim // layer.tp) * layer.itemsize
