"""The model in PyTorch."""

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import MoE
from moe_lm.sequence import Whole

__all__ = ["LanguageModel"]


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

    def forward(self, x, sequence):
        x = x + sequence.split(self.attention(sequence.gather(self.attention_norm(x))))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Characters [batch, sequence] -> logits of the next ones [batch, sequence, vocab].

    Attributes:
        sequence: whether ranks hold parts of the sequence. recompute: whether blocks run again in backward.
    """

    def __init__(self, s):
        super().__init__()
        self.sequence, self.recompute = Whole(s.sequence), False
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.position = nn.Embedding(s.sequence, s.dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_blocks))
        self.norm = nn.LayerNorm(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.position.weight[self.sequence.positions]
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.sequence, use_reentrant=False)
            else:
                x = block(x, self.sequence)
        return self.head(self.norm(x))
