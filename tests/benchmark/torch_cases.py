"""What the ranks of PyTorch do: build the contenders, check that they agree, and run them in turns."""

import gc
import time
from contextlib import ExitStack
from functools import cache

import torch
import torch.distributed as dist

from tests.benchmark import measures
from tests.benchmark.layers import build, output_and_gradients
from tests.benchmark.where import where
from tests.harness import oracle
from tests.peers import torchtitan

__all__ = ["compare", "turns", "outputs", "processor_times", "machine"]


def compare(context, work, num_repetitions, explain=False):
    """Everything that one rank measures of one work.

    Returns:
        ``spans``: contender -> per repetition (start, after forward, start of backward, after backward, processor time
        of forward, of backward); clock times are comparable between processes of one machine. ``differences``:
        relative, of outputs and gradients from ours. ``memory``, ``traffic``, ``host_copies``: contender
        -> see ``measures``. ``notes``: how contenders run. ``where``: with ``explain``, see ``where``.
    """
    with ExitStack() as stack:
        if torchtitan.installed():
            stack.enter_context(torchtitan.integer_histc())
        contenders, notes, mesh = build(work)
        layers = {name: contender for name, contender in contenders.items() if name != "floor"}
        sent = {name: measures.communication(layer, mesh) for name, layer in layers.items()}
        found = {
            "differences": _differences(layers),
            **{what: {name: each[what] for name, each in sent.items()} for what in ("traffic", "host_copies")},
            "memory": {name: measures.memory(layer) for name, layer in layers.items()},
            "notes": notes,
            "where": {name: where(each) for name, each in contenders.items()} if explain else {},
        }
        found["spans"] = _in_turns(contenders, num_repetitions)
        return found


def turns(context, work, num_repetitions):
    """Some repetitions of ours, for turns with another framework; what is built is kept for the next call."""
    return _in_turns({"ours": _kept_ours(work)}, num_repetitions)["ours"]


def outputs(context, work):
    """Output and gradient of the rows, to compare with another framework's."""
    found = output_and_gradients(_kept_ours(work))
    return found["output"].numpy(), found["x"].numpy()


@cache
def _kept_ours(work):
    return build(work, alone=True)[0]["ours"]


def processor_times(context, works, num_repetitions):
    """Per work, (ours, floor): processor seconds of forward and backward on this rank, the least of all repetitions."""
    found = []
    for work in works:
        contenders, _, _ = build(work, alone=True)
        spans = _in_turns(contenders, num_repetitions)
        found.append(tuple(min(span[4] + span[5] for span in spans[name]) for name in ("ours", "floor")))
    return found


def _in_turns(contenders, num_repetitions):
    """Forward and backward of every contender, one after the other, again and again; the first time is not kept."""
    spans = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for repetition in range(-1, num_repetitions):
            for name, contender in contenders.items():
                contender.clear()
                span = _one(contender)
                if repetition >= 0:
                    spans[name].append(span)
    finally:
        gc.enable()
    return spans


def _one(contender):
    dist.barrier()
    cpu_0, start = time.process_time(), time.monotonic()
    y = contender.forward()
    end, cpu_1 = time.monotonic(), time.process_time()
    dist.barrier()
    cpu_2, start_backward = time.process_time(), time.monotonic()
    contender.backward(y)
    end_backward, cpu_3 = time.monotonic(), time.process_time()
    dist.barrier()
    return start, end, start_backward, end_backward, cpu_1 - cpu_0, cpu_3 - cpu_2


def _differences(layers):
    """Of every layer from ours, but for the one that computes something else."""
    ours = output_and_gradients(layers["ours"])
    found = {}
    for contender, layer in layers.items():
        if contender in ("ours", "scores inside"):
            continue
        for name, value in output_and_gradients(layer).items():
            value = value.double().reshape(ours[name].shape)
            found[f"{contender}: {name}"] = oracle.relative_error(value.numpy(), ours[name].double().numpy())
        layer.clear()
    layers["ours"].clear()
    return found


def machine(context):
    """What this runs on, in words."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of an {names[0]}, torch {torch.__version__}"
