"""One rank's training step in PyTorch."""

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hyper_parallel import parallelize_module, reduce_gradients
from moe_lm.batches import Place
from moe_lm.sequence import CutOverTp
from moe_lm.torch_model import LanguageModel

__all__ = ["Trainer", "join", "leave"]

HALF = torch.bfloat16


def join():
    """Join the ranks of the launcher; this process's rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def leave():
    """Leave the other ranks."""
    dist.destroy_process_group()


class Trainer:
    """One rank's model, optimizer and training step.

    Args:
        arrangement: how the model lies on the ranks, and how its step is made.
        sum_gradients: False leaves a sum out, to show that the losses and gradients would tell.
    """

    def __init__(self, settings, weights, arrangement, sum_gradients=True):
        self.settings, self.arrangement, self.sum_gradients = settings, arrangement, sum_gradients
        self.model = LanguageModel(settings)
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        self.model.recompute = arrangement.recompute
        self.mesh = arrangement.mesh()
        self.place = Place(settings, self.mesh, arrangement)
        if self.mesh is not None:
            self._arrange()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.learning_rate, settings.betas, settings.epsilon, settings.weight_decay
        )

    def _arrange(self):
        a = self.arrangement
        parallelize_module(self.model, self.mesh["ep", "tp"], a.plan())
        if a.sequence_parallel:
            self.model.sequence = CutOverTp(self.mesh, self.settings.sequence)
        if a.fsdp:
            self._shard_by_fsdp()

    def _shard_by_fsdp(self):
        """Experts over dp, and everything else over dp and ep. Gradients are summed: losses are shares of one mean."""
        precision = MixedPrecisionPolicy(HALF, torch.float32) if self.arrangement.half else MixedPrecisionPolicy()
        for block in self.model.blocks:
            fully_shard(block.moe.experts, mesh=self.mesh["dp"], mp_policy=precision)
        fully_shard(self.model, mesh=self.mesh["dp", "ep"]._flatten("dp_ep"), mp_policy=precision)
        for module in (self.model, *(block.moe.experts for block in self.model.blocks)):
            if self.sum_gradients:
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average

    def step(self, ids, targets):
        """Train on this rank's part of a batch, [sequences, characters] in numpy.

        Returns:
            the mean loss, and the rows of each expert [block, expert], both of all ranks' sequences.
        """
        self.optimizer.zero_grad()
        total, parts = torch.zeros(()), self.place.micro_batches(ids, targets)
        for number, part in enumerate(parts, 1):
            if self.arrangement.fsdp:
                self.model.set_requires_gradient_sync(number == len(parts))
            loss = self._loss(*part)
            loss.backward()
            total += loss.detach()
        load = torch.stack([block.moe.tokens_per_expert for block in self.model.blocks])
        # Each rank's loss is its share of the mean over all tokens, so losses, load and gradients add up.
        self._sum(total, self.place.loss_axes)
        self._sum(load, self.place.batch_axes)
        self._reduce_gradients()
        self.optimizer.step()
        for block in self.model.blocks:
            block.moe.update_expert_bias(None if self.mesh is None else self.mesh["dp", "ep"])
        return total.item(), load.numpy().astype(np.int64)

    @torch.no_grad()
    def evaluate(self, ids, targets):
        """The mean loss of all ranks' sequences."""
        loss = sum(self._loss(*part) for part in self.place.micro_batches(ids, targets))
        self._sum(loss, self.place.loss_axes)
        return loss.item()

    def gradients(self):
        """The last step's, of the whole model: {name: array}. Every rank calls this."""
        return {name: _whole(p.grad) for name, p in self.model.named_parameters()}

    def weights(self):
        """Those of the whole model: {name: array}. Every rank calls this."""
        return {name: _whole(p.detach()) for name, p in self.model.named_parameters()}

    def own_part(self, name, whole):
        """What ``gradients`` and ``weights`` hold of a whole array."""
        return whole

    def largest(self, number):
        """The largest of the ranks' numbers."""
        number = torch.tensor(number, dtype=torch.float64)
        if self.mesh is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def _loss(self, ids, targets):
        half = self.arrangement.half and not self.arrangement.fsdp
        with torch.autocast("cpu", HALF) if half else nullcontext():
            logits = self.model(torch.from_numpy(ids))
        loss = F.cross_entropy(logits.float().flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="sum")
        return loss / self.settings.tokens

    def _reduce_gradients(self):
        if self.mesh is None or not self.sum_gradients:
            return
        # Attention sees the whole sequence; around it each rank of a cut sequence sees its part of the tokens.
        complete = [p for block in self.model.blocks for p in block.attention.parameters()]
        others = [p for p in self.model.parameters() if all(p is not q for q in complete)]
        reduce_gradients(complete, self.mesh["dp", "ep"])
        reduce_gradients(others, self.mesh[self.place.loss_axes])

    def _sum(self, tensor, axes):
        for axis in axes:
            dist.all_reduce(tensor, group=self.mesh.get_group(axis))


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()
