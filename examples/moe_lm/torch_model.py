"""The model in PyTorch, and its training step."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel import ExpertTensorParallel, MoE, init_device_mesh, parallelize_module, reduce_gradients

__all__ = ["Trainer"]


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.attention_norm = nn.LayerNorm(s.dim)
        self.attention = Attention(s.dim, s.num_heads)
        self.moe_norm = nn.LayerNorm(s.dim)
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

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Characters [batch, sequence] -> logits of the next ones [batch, sequence, vocab]."""

    def __init__(self, s):
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.position = nn.Embedding(s.sequence, s.dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_blocks))
        self.norm = nn.LayerNorm(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trainer:
    """One rank's model, optimizer and training step; the whole model without a ``mesh_shape``.

    Attributes:
        rank: of this process. ep_rank, ep_size: its place among the ranks that share out the batch.
    """

    def __init__(self, settings, weights, mesh_shape=None):
        self.tokens, self.rank, self.ep_rank, self.ep_size = settings.tokens, 0, 0, 1
        self.model = LanguageModel(settings)
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        self.ep_mesh = None
        if mesh_shape is not None:
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ep", "tp"))
            parallelize_module(self.model, mesh, {"blocks.*.moe.experts": ExpertTensorParallel()})
            self.rank, self.ep_mesh = dist.get_rank(), mesh["ep"]
            self.ep_rank, self.ep_size = self.ep_mesh.get_local_rank(), self.ep_mesh.size()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.learning_rate, settings.betas, settings.epsilon, settings.weight_decay
        )

    def step(self, ids, targets):
        """Train on this rank's sequences.

        Returns:
            the mean loss, and the rows of each expert [block, expert], both of all ranks' sequences.
        """
        self.optimizer.zero_grad()
        loss = self._loss(ids, targets)
        loss.backward()
        loss, load = loss.detach(), torch.stack([block.moe.tokens_per_expert for block in self.model.blocks]).float()
        # Each rank's loss is its share of the mean over all tokens, so loss, load and gradients add up over ep.
        self._sum_over_ep([loss, load])
        if self.ep_mesh is not None:
            reduce_gradients(self.model.parameters(), self.ep_mesh)
        self.optimizer.step()
        for block in self.model.blocks:
            block.moe.update_expert_bias(self.ep_mesh)
        return loss.item(), load.numpy().astype(np.int64)

    @torch.no_grad()
    def evaluate(self, ids, targets):
        """The mean loss of all ranks' sequences."""
        loss = self._loss(ids, targets)
        self._sum_over_ep([loss])
        return loss.item()

    def close(self):
        if self.ep_mesh is not None:
            dist.destroy_process_group()

    def _loss(self, ids, targets):
        logits = self.model(torch.from_numpy(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="sum")
        return loss / self.tokens

    def _sum_over_ep(self, tensors):
        """Sum the tensors in place, in one collective."""
        if self.ep_mesh is not None:
            summed = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(summed, group=self.ep_mesh.get_group())
            for tensor, new in zip(tensors, summed.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(new.view_as(tensor))
