"""The floor: the matrix products and the large collectives of a layer, and nothing else.

Each kind of product is done by the library call that is fastest on this rank at the start of the run. There is no
elementwise work, no reordering, no allocation, and neither counts nor scores travel.

Shape suffixes: R rows of this rank's experts, L experts of this rank, D model size, H hidden size of this rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.benchmark.timing import processor_time

__all__ = ["Floor"]


class Floor:
    """Has ``forward()`` and ``backward(None)`` like a layer.

    Args:
        work: layer, dtype and mesh. batch: what this rank's ep coordinate holds. shards: this rank's w1, w2, w3.
        ep_group, tp_group: process groups.
    """

    def __init__(self, work, batch, shards, ep_group, tp_group):
        self._work, self._ep_group, self._tp_group = work, ep_group, tp_group
        dtype = getattr(torch, work.dtype)
        counts_PL = torch.from_numpy(batch.counts_E).view(work.ep, -1)
        received_PL = torch.empty_like(counts_PL)
        dist.all_to_all_single(received_PL, counts_PL, group=ep_group)
        self._send_splits, self._recv_splits = counts_PL.sum(1).tolist(), received_PL.sum(1).tolist()
        counts_L = received_PL.sum(0).tolist()
        w1, w2, w3 = (torch.from_numpy(shards[name]).to(dtype).contiguous() for name in ("w1", "w2", "w3"))
        rows, dim, hidden = sum(counts_L), work.shape.dim, w1.shape[1]
        x_RD, y_RD, dy_RD = (torch.randn(rows, dim).to(dtype) for _ in range(3))
        h_RH, dh_RH = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
        row_products = [
            ("gate, up", x_RD, w1.transpose(1, 2), h_RH, 2),
            ("down", h_RH, w2.transpose(1, 2), y_RD, 1),
            ("grad hidden", dy_RD, w2, dh_RH, 1),
            ("grad rows", dh_RH, w3, x_RD, 2),
        ]
        weight_products = [
            ("grad w1, w3", dh_RH, x_RD, torch.empty_like(w1), 2),
            ("grad w2", dy_RD, h_RH, torch.empty_like(w2), 1),
        ]
        chosen = [
            (name, times, *_fastest(_row_candidates(a, b, out, counts_L))) for name, a, b, out, times in row_products
        ]
        chosen += [
            (name, times, *_fastest(_weight_candidates(a, b, out, counts_L)))
            for name, a, b, out, times in weight_products
        ]
        self.choices = {name: call for name, _, call, _ in chosen}
        products = [product for _, times, _, product in chosen for _ in range(times)]
        self._forward_products, self._backward_products = products[:3], products[3:]
        self._local_rows = torch.zeros(rows, dim, dtype=dtype)
        self._own_rows = torch.zeros(sum(self._send_splits), dim, dtype=dtype)
        self._tokens = torch.zeros(work.tokens, dim, dtype=dtype)
        for buffer in (self._local_rows, self._own_rows, self._tokens):
            buffer.fill_(0)  # fresh zeros are not memory yet
        self._gate = _gate_products(work, dtype) if work.layer == "moe" else ((), ())

    def forward(self):
        self._run(self._gate[0] + tuple(self._forward_products))

    def backward(self, _):
        self._run(tuple(self._backward_products) + self._gate[1])

    def clear(self):
        pass

    def _run(self, products):
        self._exchange(self._own_rows, self._local_rows, self._send_splits, self._recv_splits)
        for product in products:
            product()
        if self._work.tp > 1:
            summed = self._local_rows if self._work.layer == "experts" else self._tokens
            dist.all_reduce(summed, group=self._tp_group)
        self._exchange(self._local_rows, self._own_rows, self._recv_splits, self._send_splits)

    def _exchange(self, source, target, send_splits, recv_splits):
        if self._work.ep > 1:
            dist.all_to_all_single(target, source, recv_splits, send_splits, group=self._ep_group)


def _gate_products(work, dtype):
    tokens, gate = (torch.randn(n, work.shape.dim).to(dtype) for n in (work.tokens, work.shape.num_experts))
    logits, grad_gate, grad_tokens = tokens @ gate.t(), torch.empty_like(gate), torch.empty_like(tokens)
    return (lambda: torch.mm(tokens, gate.t(), out=logits),), (
        lambda: torch.mm(logits.t(), tokens, out=grad_gate),
        lambda: torch.mm(logits, gate, out=grad_tokens),
    )


def _groups(counts_L):
    ends = torch.tensor(counts_L).cumsum(0).tolist()
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(counts_L, ends)) if count]


def _row_candidates(a_RK, b_LKN, out_RN, counts_L):
    """``out[rows of e] = a[rows of e] @ b[e]`` for every expert e."""
    groups = _groups(counts_L)

    def mm():
        for e, start, stop in groups:
            torch.mm(a_RK[start:stop], b_LKN[e], out=out_RN[start:stop])

    def linear():
        for e, start, stop in groups:
            F.linear(a_RK[start:stop], b_LKN[e].t())

    offsets = torch.tensor(counts_L).cumsum(0).int()
    most = max(counts_L)
    padded_a, padded_out = (x.new_ones(len(counts_L), most, x.shape[1]) for x in (a_RK, out_RN))
    return {
        "mm": mm,
        "linear": linear,
        "bmm": lambda: torch.bmm(padded_a, b_LKN, out=padded_out),
        "_grouped_mm": lambda: torch._grouped_mm(a_RK, b_LKN, offs=offsets),
    }


def _weight_candidates(a_RM, b_RN, out_LMN, counts_L):
    """``out[e] = a[rows of e].T @ b[rows of e]`` for every expert e."""
    groups = _groups(counts_L)

    def mm():
        for e, start, stop in groups:
            torch.mm(a_RM[start:stop].t(), b_RN[start:stop], out=out_LMN[e])

    offsets = torch.tensor(counts_L).cumsum(0).int()
    most = max(counts_L)
    padded_a, padded_b = (x.new_ones(len(counts_L), most, x.shape[1]) for x in (a_RM, b_RN))
    return {
        "mm": mm,
        "bmm": lambda: torch.bmm(padded_a.transpose(1, 2), padded_b, out=out_LMN),
        "_grouped_mm": lambda: torch._grouped_mm(a_RM.t(), b_RN, offs=offsets),
    }


def _fastest(candidates):
    """(name, call) of the one that takes the least processor time, which other ranks disturb less than wall time."""
    took = {}
    for name, call in candidates.items():
        try:
            took[name] = min(processor_time(call) for _ in range(3))
        except RuntimeError:  # not every call takes every shape
            continue
    best = min(took, key=took.get)
    return best, candidates[best]
