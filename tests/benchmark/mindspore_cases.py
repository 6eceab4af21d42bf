"""What the ranks of MindSpore do: ours on the same experts as torch, and MindSpore's own floor.

The floor is made of plain products, the faster of two calls, and of MindSpore's own collectives on tensors that are
ready: sends and receives where torch has an all-to-all, for MindSpore's CPU backend has none.
"""

import cProfile
import gc
import pstats
import time
from functools import cache

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import mint, ops
from mindspore.mint import distributed as dist
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

import hyper_parallel as hp
from tests.benchmark.inputs import make_batch, make_weights
from tests.benchmark.timing import processor_time

__all__ = ["turns", "outputs", "profile"]


def turns(context, work, num_repetitions):
    """Spans of ours and of MindSpore's floor in turns; see ``torch_cases.compare``.

    In PyNative mode a backward pass comes with its forward pass: the second span of ours is of both together.
    """
    contenders = {"ours": _ours(context, work), "floor": _floor(context, work)}
    spans = {name: [] for name in contenders}
    gc.collect()
    for repetition in range(-1, num_repetitions):
        for name, contender in contenders.items():
            span = [number for step in (contender.forward, contender.both) for number in _timed(step)]
            if repetition >= 0:
                spans[name].append(span)
    return spans


def outputs(context, work):
    """Output and gradient of the rows, to compare with torch's."""
    ours = _ours(context, work)
    return ours.forward().asnumpy(), ours.both()[0][0].asnumpy()


def profile(context, work, num_repetitions):
    """Where the time of forward and backward goes: seconds by place, on this rank, by Python's profiler.

    Every operator is complete when its call returns (``launch_blocking``), so that a call's time is its work.
    """
    ours = _ours(context, work)
    ours.both()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_repetitions):
        ours.both()
    profiler.disable()
    found = {}
    for (file, _, function), (_, calls, own, _, _) in pstats.Stats(profiler).stats.items():
        place = _place(file, function)
        seconds, count = found.get(place, (0.0, 0))
        found[place] = seconds + own / num_repetitions, count + calls / num_repetitions
    return found


def _place(file, function):
    if "hyper_parallel" in file:
        return "our Python, and tensors' + and * in it"
    if any(word in f"{file} {function}" for word in ("wait", "dist_comm", "all_reduce", "communication")):
        return "communication and waiting for it"
    return "MindSpore's Python" if "mindspore" in file else function


def _timed(step):
    dist.barrier()
    cpu, start = time.process_time(), time.monotonic()
    step()
    return start, time.monotonic(), time.process_time() - cpu


class _Ours:
    def __init__(self, experts, x, counts, grad):
        self._call, self._x, self._grad = lambda x: experts(x, counts), x, grad
        differentiate = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
        self._gradients = differentiate(self._call, ms.ParameterTuple(experts.trainable_params()))

    def forward(self):
        return self._call(self._x)

    def both(self):
        return self._gradients(self._x, self._grad)


@cache
def _ours(context, work):
    hp.set_platform("mindspore")
    shape, mesh = work.shape, _mesh(work)
    weights = make_weights(shape)
    batch = make_batch(work, mesh.get_local_rank("ep"), weights.gate_ED)
    experts = hp.GroupedExperts(shape.dim, shape.hidden_dim, shape.num_experts)
    for name, value in (("w1", weights.w1_EHD), ("w2", weights.w2_EDH), ("w3", weights.w3_EHD)):
        context.framework.set_parameter(experts, name, value)
    hp.ExpertTensorParallel().apply(experts, mesh)
    return _Ours(experts, ms.Tensor(batch.rows_RD), ms.Tensor(batch.counts_E), ms.Tensor(batch.grad_RD))


@cache
def _mesh(work):
    hp.set_platform("mindspore")
    return hp.init_device_mesh("cpu", (work.ep, work.tp), mesh_dim_names=("ep", "tp"))


@cache
def _floor(context, work):
    return _Floor(work, _mesh(work))


class _Floor:
    """Products and collectives of the experts layer, on tensors that are ready."""

    def __init__(self, work, mesh):
        self._mesh, self._work, shape = mesh, work, work.shape
        gate_ED = make_weights(shape).gate_ED
        counts_PE = np.stack([make_batch(work, r, gate_ED).counts_E for r in range(work.ep)])
        ep_rank, num_local = mesh.get_local_rank("ep"), shape.num_experts // work.ep
        counts_PL = counts_PE[:, ep_rank * num_local : (ep_rank + 1) * num_local]
        hidden = shape.hidden_dim // work.tp
        self._forward, self._backward = [], []
        for rows in (int(n) for n in counts_PL.sum(0)):
            if rows:
                up, down = (rows, shape.dim, hidden), (rows, hidden, shape.dim)
                self._forward += [up, up, down]
                # Gradients of the hidden rows, of w2, w1, w3 and, twice, of the rows.
                self._backward += [up, (hidden, rows, shape.dim), (hidden, rows, shape.dim), (shape.dim, rows, hidden)]
                self._backward += [down, down]
        products = {sizes: _fastest_product(*sizes) for sizes in {*self._forward, *self._backward}}
        self._forward = [products[sizes] for sizes in self._forward]
        self._backward = [products[sizes] for sizes in self._backward]
        sent_P, received_P = counts_PE[ep_rank].reshape(work.ep, -1).sum(1), counts_PL.sum(1)
        self._sent, self._received = (
            [mint.zeros((int(n), shape.dim), dtype=ms.float32) + 0 for n in split] for split in (sent_P, received_P)
        )
        self._summed = mint.zeros((int(counts_PL.sum()), shape.dim), dtype=ms.float32) + 0

    def forward(self):
        self._run(self._forward)

    def both(self):
        self._run(self._forward)
        self._run(self._backward)

    def _run(self, products):
        self._exchange(self._sent, self._received)
        for product in products:
            product()
        if self._work.tp > 1:
            dist.all_reduce(self._summed, group=self._mesh.get_group("tp"))
        self._exchange(self._received, self._sent)

    def _exchange(self, sources, targets):
        if self._work.ep == 1:
            return
        group = self._mesh.get_group("ep")
        rank = comm.get_rank(group)
        peers = [(rank + step) % self._work.ep for step in range(1, self._work.ep)]
        handles = [dist_comm_isend_op(sources[r], r, group, 0)[1] for r in peers if sources[r].shape[0]]
        handles += [dist_comm_irecv_op(targets[r], 0, r, group)[1] for r in peers if targets[r].shape[0]]
        for handle in handles:
            handle.wait()
        ms.runtime.synchronize()


def _fastest_product(m, k, n):
    """A call that multiplies [m, k] by [k, n]: plainly, or with the second factor stored transposed."""
    draw = np.random.default_rng(0)
    a, b, b_t = (ms.Tensor(draw.random(sizes, dtype=np.float32)) for sizes in ((m, k), (k, n), (n, k)))
    transposed = ops.MatMul(transpose_b=True)
    calls = (lambda: mint.matmul(a, b), lambda: transposed(a, b_t))
    return min(calls, key=lambda call: min(processor_time(call) for _ in range(3)))
