"""The model in MindSpore, and its training step."""

import mindspore as ms
import mindspore.communication as comm
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental import optim
from mindspore.mint import distributed as dist

from hyper_parallel import ExpertTensorParallel, MoE, init_device_mesh, parallelize_module, reduce_gradients

__all__ = ["Trainer"]

# What MindSpore calls a parameter -> what it is called in the file of initial weights.
TORCH_NAMES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


class Attention(nn.Cell):
    def __init__(self, dim, num_heads, sequence):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Dense(dim, 3 * dim, has_bias=False)
        self.out = nn.Dense(dim, dim, has_bias=False)
        self.mask = Tensor(np.triu(np.full((sequence, sequence), -1e9, np.float32), 1))

    def construct(self, x):
        batch, sequence, dim = x.shape
        qkv = self.qkv(x).reshape((batch, sequence, 3, self.num_heads, self.head_dim)).transpose((2, 0, 3, 1, 4))
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = mint.matmul(q, k.swapaxes(-1, -2)) * self.head_dim**-0.5 + self.mask
        y = mint.matmul(ops.softmax(scores, -1), v)
        return self.out(y.transpose((0, 2, 1, 3)).reshape((batch, sequence, dim)))


class Block(nn.Cell):
    def __init__(self, s):
        super().__init__()
        self.attention_norm = nn.LayerNorm((s.dim,), epsilon=1e-5)
        self.attention = Attention(s.dim, s.num_heads, s.sequence)
        self.moe_norm = nn.LayerNorm((s.dim,), epsilon=1e-5)
        self.moe = MoE(
            s.dim,
            s.hidden_dim,
            s.num_experts,
            s.top_k,
            num_shared_experts=s.num_shared_experts,
            route_norm=True,
            route_scale=s.route_scale,
            bias_update_rate=s.bias_update_rate,
        )

    def construct(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Cell):
    """Characters [batch, sequence] -> logits of the next ones [batch, sequence, vocab]."""

    def __init__(self, s):
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.position = nn.Embedding(s.sequence, s.dim)
        self.blocks = nn.CellList([Block(s) for _ in range(s.num_blocks)])
        self.norm = nn.LayerNorm((s.dim,), epsilon=1e-5)
        self.head = nn.Dense(s.dim, s.vocab, has_bias=False)

    def construct(self, ids):
        x = self.embedding(ids) + self.position.embedding_table
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trainer:
    """One rank's model, optimizer and training step; the whole model without a ``mesh_shape``.

    Attributes:
        rank: of this process. ep_rank, ep_size: its place among the ranks that share out the batch.
    """

    def __init__(self, settings, weights, mesh_shape=None):
        ms.set_device("CPU")
        # On a CPU, waiting for each small operator is several times faster than queueing it.
        ms.runtime.launch_blocking()
        if mesh_shape is not None:
            # msrun's scheduler is one more process that runs this script: it serves the ranks, and ends here.
            comm.init("mccl")
        self.tokens, self.rank, self.ep_rank, self.ep_size = settings.tokens, 0, 0, 1
        self.model = LanguageModel(settings)
        for name, parameter in self.model.parameters_and_names():
            *path, last = name.split(".")
            if parameter.requires_grad:
                parameter.set_data(Tensor(weights[".".join([*path, TORCH_NAMES.get(last, last)])]))
        self.ep_mesh = None
        if mesh_shape is not None:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ep", "tp"))
            parallelize_module(self.model, mesh, {"blocks.*.moe.experts": ExpertTensorParallel()})
            self.rank, self.ep_mesh = comm.get_rank(), mesh["ep"]
            self.ep_rank, self.ep_size = self.ep_mesh.get_local_rank(), self.ep_mesh.size()
        self.parameters = self.model.trainable_params()
        self.optimizer = optim.AdamW(
            self.parameters, settings.learning_rate, settings.betas, settings.epsilon, settings.weight_decay
        )
        self.loss_and_gradients = ms.value_and_grad(self._loss, None, self.parameters)

    def step(self, ids, targets):
        """Train on this rank's sequences.

        Returns:
            the mean loss, and the rows of each expert [block, expert], both of all ranks' sequences.
        """
        loss, gradients = self.loss_and_gradients(Tensor(ids), Tensor(targets))
        load = Tensor(np.stack([block.moe.tokens_per_expert.asnumpy() for block in self.model.blocks]), ms.float32)
        # Each rank's loss is its share of the mean over all tokens, so loss, load and gradients add up over ep.
        loss, load = self._sum_over_ep([loss, load])
        if self.ep_mesh is not None:
            gradients = reduce_gradients(self.parameters, self.ep_mesh, gradients)
        self.optimizer(gradients)
        for block in self.model.blocks:
            block.moe.update_expert_bias(self.ep_mesh)
        return float(loss.asnumpy()), load.asnumpy().astype(np.int64)

    def evaluate(self, ids, targets):
        """The mean loss of all ranks' sequences."""
        return float(self._sum_over_ep([self._loss(Tensor(ids), Tensor(targets))])[0].asnumpy())

    def close(self):
        """Nothing: MindSpore leaves the other ranks when the process ends."""

    def _loss(self, ids, targets):
        logits = self.model(ids)
        logits, targets = logits.reshape((-1, logits.shape[-1])), targets.reshape(-1).astype(ms.int32)
        return ops.cross_entropy(logits, targets, reduction="sum") / self.tokens

    def _sum_over_ep(self, tensors):
        """The tensors' sums, by one collective."""
        if self.ep_mesh is None:
            return tensors
        # All-reduce works in place, and on MindSpore only on a buffer of its own, not on views.
        summed = mint.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(summed, group=self.ep_mesh.get_group())
        pieces = mint.split(summed, [tensor.size for tensor in tensors])
        return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors)]
