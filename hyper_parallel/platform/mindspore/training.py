"""A training step that ``mindspore.train.Model`` takes."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from hyper_parallel.core.types import Mesh
from hyper_parallel.training import all_finite, clip_grad_norm_, reduce_gradients

__all__ = ["TrainOneStepCell"]


class TrainOneStepCell(nn.TrainOneStepCell):
    """MindSpore's cell of this name for a network with sharded experts: gradients are reduced by placements, and
    clipped by the norm of the whole model; an overflow on one rank is one on all.

    ``Model(TrainOneStepCell(nn.WithLossCell(net, loss), optimizer, mesh["dp", "ep"])).train(epochs, dataset)``:
    ``Model`` gets no loss and no optimizer of its own. Each rank's dataset yields its own tokens, the same over tp.

    Args:
        network: its output is the loss of this rank's tokens.
        optimizer: made of the network's parameters after the styles were applied.
        mesh: the axes whose ranks see different tokens.
        op: as in :func:`hyper_parallel.reduce_gradients`. "mean": losses are means of equally many tokens, and
            gradients are averaged, also over the calls of an accumulated step. "sum": both are summed.
        max_norm: clip to this norm of the whole gradient; None does not.
        loss_scaler: of ``mindspore.amp``. A step in which any rank's gradients are not finite is left out on all.
        accumulation_steps: calls whose gradients make one step of the optimizer, taken by the last of them. The sum
            waits on this cell in the meantime.

    Outputs:
        The loss of this rank, not scaled. With a loss scaler (loss, whether the step was left out, scale), as of
        ``nn.TrainOneStepWithLossScaleCell``.

    Raises:
        ValueError: the optimizer holds parameters that the network does not have, as one made before ``apply`` does;
            a number out of range. RuntimeError: MindSpore does not run in PyNative mode.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        mesh: Mesh,
        op: str = "mean",
        max_norm: float | None = None,
        loss_scaler: Any = None,
        accumulation_steps: int = 1,
    ) -> None:
        _check_pynative()
        _check_parameters(network, optimizer)
        if op not in ("sum", "mean"):
            raise ValueError(f'op must be "sum" or "mean", got {op!r}')
        if accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
        super().__init__(network, optimizer)
        self._mesh, self._op, self._max_norm, self._scaler = mesh, op, max_norm, loss_scaler
        self._accumulation_steps, self._calls, self._waiting = accumulation_steps, 0, None
        self._differentiate = ms.value_and_grad(self._losses, None, tuple(self.weights), has_aux=True)

    def __call__(self, *inputs):
        _check_pynative()
        return super().__call__(*inputs)

    def construct(self, *inputs):
        """One call: the loss of the network's ``inputs``, and a step of the optimizer if it is due."""
        (_, loss), grads = self._differentiate(*inputs)
        self._waiting = grads if self._waiting is None else tuple(a + b for a, b in zip(self._waiting, grads))
        self._calls += 1
        left_out = False
        if self._calls == self._accumulation_steps:
            grads, self._calls, self._waiting = self._waiting, 0, None
            left_out = not self._step(grads)
        return loss if self._scaler is None else (loss, Tensor(left_out), self._scaler.scale(Tensor(1.0, ms.float32)))

    def _losses(self, *inputs):
        """What is differentiated, and the loss."""
        loss = self.network(*inputs)
        return loss if self._scaler is None else self._scaler.scale(loss), loss

    def _step(self, grads):
        """Whether the optimizer took the step."""
        grads = reduce_gradients(self.weights, self._mesh, grads, self._op)
        if self._op == "mean" and self._accumulation_steps > 1:
            grads = tuple(gradient / self._accumulation_steps for gradient in grads)
        if self._scaler is not None:
            finite = all_finite(self.weights, grads, self._mesh)
            grads = self._scaler.unscale(grads)
            self._scaler.adjust(Tensor(finite))
            if not finite:
                return False
        if self._max_norm is not None:
            grads, _ = clip_grad_norm_(self.weights, self._max_norm, grads=grads)
        self.optimizer(grads)
        return True


def _check_pynative():
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise RuntimeError(
            "hyper_parallel runs in MindSpore's PyNative mode: mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
        )


def _check_parameters(network, optimizer):
    known = {id(parameter) for parameter in network.get_parameters()}
    unknown = [parameter.name for parameter in optimizer.parameters if id(parameter) not in known]
    if unknown:
        raise ValueError(
            f"the optimizer holds {len(unknown)} parameters that the network does not have, such as {unknown[0]}; make "
            "it of network.trainable_params() after the styles were applied, which replace parameters"
        )
