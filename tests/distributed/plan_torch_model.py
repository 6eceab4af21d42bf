"""A small language model of the library's layers, with the parameters of a Hugging Face configuration of family mixtral
(grouped attention) or qwen2_moe with biases left out; attention itself is of no interest here."""

import torch
from torch import nn

import hyper_parallel as hp


class Layer(nn.Module):
    def __init__(self, dim, num_heads, num_kv_heads, moe):
        super().__init__()
        head_dim = dim // num_heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.moe = moe

    def forward(self, x):
        normed = self.norms[0](x)
        mixed = self.query(normed) + (self.key(normed) + self.value(normed)).mean(-1, keepdim=True)
        x = x + self.output(mixed)
        return x + self.moe(self.norms[1](x))


class LanguageModel(nn.Module):
    def __init__(self, dim, hidden_dim, num_experts, top_k, num_layers, num_heads, num_kv_heads, vocab_size, shared):
        super().__init__()
        hp.set_platform("torch")
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Layer(
                dim,
                num_heads,
                num_kv_heads,
                hp.MoE(dim, hidden_dim, num_experts, top_k, num_shared_experts=shared),
            )
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).to(torch.float32)
