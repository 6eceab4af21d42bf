"""What collectives on Ascend devices do otherwise than ``collectives``: counts travel beside the stream of the rows."""

import functools

import numpy as np
import torch

from hyper_parallel.platform.torch import collectives, compat

__all__ = ["CountsExchange"]


class CountsExchange(collectives.CountsExchange):
    """The exchange and the copy to the host are launched together, on a stream of their own.

    So the host waits for the counts alone, and not for what is launched after them, such as the gather of the rows.
    """

    def __init__(self, counts, group, name, also):
        stream, current = _stream(counts.device), torch.npu.current_stream(counts.device)
        stream.wait_stream(current)
        with torch.npu.stream(stream):
            super().__init__(counts, group, name, also)
            self._received = compat.wait_tensor(self._received)
            copied = torch.cat([*self._known, self._received])
            self._values = torch.empty(copied.shape, dtype=copied.dtype, pin_memory=True)
            self._values.copy_(copied, non_blocking=True)
            self._done = stream.record_event()
        for tensor in self._known:
            tensor.record_stream(stream)

    def wait(self):
        with collectives.named(self._name, self._group):
            current = torch.npu.current_stream(self._received.device)
            current.wait_event(self._done)
        self._received.record_stream(current)
        return self._received

    def to_host(self):
        with collectives.named(self._name, self._group):
            self._done.synchronize()
        ends = np.cumsum([len(tensor) for tensor in self._known])
        return [piece.tolist() for piece in np.split(self._values.numpy(), ends)]


@functools.cache
def _stream(device):
    return torch.npu.Stream(device)
