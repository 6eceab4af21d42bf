"""The model in MindSpore."""

import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import MoE
from moe_lm.sequence import Whole

__all__ = ["LanguageModel"]


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

    def construct(self, x, sequence):
        x = x + sequence.split(self.attention(sequence.gather(self.attention_norm(x))))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Cell):
    """Characters [batch, sequence] -> logits of the next ones [batch, sequence, vocab].

    Attributes:
        sequence: whether ranks hold parts of the sequence.
    """

    def __init__(self, s):
        super().__init__()
        self.sequence = Whole(s.sequence)
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.position = nn.Embedding(s.sequence, s.dim)
        self.blocks = nn.CellList([Block(s) for _ in range(s.num_blocks)])
        self.norm = nn.LayerNorm((s.dim,), epsilon=1e-5)
        self.head = nn.Dense(s.dim, s.vocab, has_bias=False)

    def construct(self, ids):
        x = self.embedding(ids) + self.position.embedding_table[self.sequence.positions]
        for block in self.blocks:
            x = block(x, self.sequence)
        return self.head(self.norm(x))
