"""One rank's training step in MindSpore."""

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Tensor, ops
from mindspore.experimental import optim
from mindspore.mint import distributed as dist

from hyper_parallel import parallelize_module, reduce_gradients
from moe_lm.batches import Place
from moe_lm.mindspore_model import LanguageModel
from moe_lm.sequence import CutOverTp

__all__ = ["Trainer", "join", "leave"]

# What MindSpore calls a parameter -> what it is called in the file of initial weights.
TORCH_NAMES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}
HALF_SCALE = 1024  # of losses in fp16, whose gradients would be lost among the smallest numbers


def join():
    """Join the ranks of the launcher; this process's rank."""
    ms.set_device("CPU")
    # msrun's scheduler is one more process that runs this script: it serves the ranks, and ends here.
    comm.init("mccl")
    return comm.get_rank()


def leave():
    """Nothing: MindSpore leaves the other ranks when the process ends."""


class Trainer:
    """One rank's model, optimizer and training step.

    Args:
        arrangement: how the model lies on the ranks, and how its step is made.
        sum_gradients: False leaves a sum out, to show that the losses and gradients would tell.
    """

    def __init__(self, settings, weights, arrangement, sum_gradients=True):
        # On a CPU, waiting for each small operator is several times faster than queueing it.
        ms.runtime.launch_blocking()
        self.settings, self.arrangement, self.sum_gradients = settings, arrangement, sum_gradients
        self.model = LanguageModel(settings)
        for name, parameter in self.model.parameters_and_names():
            if parameter.requires_grad:
                parameter.set_data(Tensor(weights[_torch_name(name)]))
        self.mesh = arrangement.mesh()
        self.place = Place(settings, self.mesh, arrangement)
        self._arrange()
        named = {_torch_name(name): p for name, p in self.model.parameters_and_names() if p.requires_grad}
        self.parameters, self.last_gradients = named, ()
        self.optimizer = optim.AdamW(
            list(named.values()), settings.learning_rate, settings.betas, settings.epsilon, settings.weight_decay
        )
        self.scale = HALF_SCALE if arrangement.half else 1
        self.loss_and_gradients = ms.value_and_grad(self._scaled_loss, None, list(named.values()), has_aux=True)

    def _arrange(self):
        a = self.arrangement
        if self.mesh is not None:
            parallelize_module(self.model, self.mesh["ep", "tp"], a.plan())
        if a.sequence_parallel:
            self.model.sequence = CutOverTp(self.mesh, self.settings.sequence)
        if a.half:
            ms.amp.auto_mixed_precision(self.model, "O2", ms.float16)
        if a.recompute:
            for block in self.model.blocks:
                block.recompute()

    def step(self, ids, targets):
        """Train on this rank's part of a batch, [sequences, characters] in numpy.

        Returns:
            the mean loss, and the rows of each expert [block, expert], both of all ranks' sequences.
        """
        total, gradients = 0, None
        for part in self.place.micro_batches(ids, targets):
            (_, loss), new = self.loss_and_gradients(*map(Tensor, part))
            total += loss
            gradients = new if gradients is None else tuple(a + b for a, b in zip(gradients, new))
        load = Tensor(np.stack([block.moe.tokens_per_expert.asnumpy() for block in self.model.blocks]), ms.float32)
        # Each rank's loss is its share of the mean over all tokens, so losses, load and gradients add up.
        total, load = self._summed(total, self.place.loss_axes), self._summed(load, self.place.batch_axes)
        self.last_gradients = self._reduced(tuple(gradient / self.scale for gradient in gradients))
        self.optimizer(self.last_gradients)
        for block in self.model.blocks:
            block.moe.update_expert_bias(None if self.mesh is None else self.mesh["dp", "ep"])
        return float(total.asnumpy()), load.asnumpy().astype(np.int64)

    def evaluate(self, ids, targets):
        """The mean loss of all ranks' sequences."""
        loss = sum(self._scaled_loss(*map(Tensor, part))[1] for part in self.place.micro_batches(ids, targets))
        return float(self._summed(loss, self.place.loss_axes).asnumpy())

    def gradients(self):
        """The last step's, of this rank's part of the model: {name: array}."""
        return {name: gradient.asnumpy() for name, gradient in zip(self.parameters, self.last_gradients)}

    def weights(self):
        """Those of this rank's part of the model: {name: array}."""
        return {name: parameter.asnumpy() for name, parameter in self.parameters.items()}

    def own_part(self, name, whole):
        """What ``gradients`` and ``weights`` hold of a whole array."""
        parameter = self.parameters[name]
        for axis, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                mesh = parameter.device_mesh
                whole = np.split(whole, mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
        return whole

    def largest(self, number):
        """The largest of the ranks' numbers."""
        number = Tensor([number], ms.float32)
        if self.mesh is not None:
            dist.all_reduce(number, "max")
        return float(number.asnumpy()[0])

    def _scaled_loss(self, ids, targets):
        """What is differentiated, and the loss."""
        logits = self.model(ids)
        logits, targets = logits.reshape((-1, logits.shape[-1])), targets.reshape(-1).astype(ms.int32)
        loss = ops.cross_entropy(logits.astype(ms.float32), targets, reduction="sum") / self.settings.tokens
        return loss * self.scale, loss

    def _reduced(self, gradients):
        if self.mesh is None or not self.sum_gradients:
            return gradients
        # Attention sees the whole sequence; around it each rank of a cut sequence sees its part of the tokens.
        reduced = {}
        for axes, is_complete in ((("dp", "ep"), True), (self.place.loss_axes, False)):
            names = [name for name in self.parameters if (".attention." in name) == is_complete]
            own = [gradient for name, gradient in zip(self.parameters, gradients) if name in names]
            new = reduce_gradients([self.parameters[name] for name in names], self.mesh[axes], own)
            reduced.update(zip(names, new))
        return tuple(reduced[name] for name in self.parameters)

    def _summed(self, tensor, axes):
        # All-reduce works in place, and on MindSpore only on a buffer of its own, not on views.
        tensor = tensor * 1
        for axis in axes:
            dist.all_reduce(tensor, group=self.mesh.get_group(axis))
        return tensor


def _torch_name(name):
    *path, last = name.replace("._backbone", "").split(".")  # around what O2 keeps in fp32
    return ".".join([*path, TORCH_NAMES.get(last, last)])
