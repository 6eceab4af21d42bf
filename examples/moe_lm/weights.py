"""The weights that every run starts from: drawn once, kept as a safetensors file, read by both frameworks."""

import os

import numpy as np
from safetensors.numpy import load_file, save_file

__all__ = ["save_initial_weights", "load_initial_weights"]

FILE = "initial.safetensors"


def save_initial_weights(settings, folder):
    """Draw the weights and write them into ``folder``. Ranks that do so at the same time write the same."""
    rng = np.random.default_rng(settings.seed)
    unfinished = folder / f"{FILE}.{os.getpid()}"
    save_file({name: _draw(rng, name, shape) for name, shape in _shapes(settings).items()}, unfinished)
    unfinished.replace(folder / FILE)


def load_initial_weights(folder):
    """{name: float32 array}, under the names that PyTorch gives them."""
    return load_file(folder / FILE)


def _draw(rng, name, shape):
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.startswith(("embedding", "position")):
        return rng.normal(0, 0.1, shape).astype(np.float32)
    bound = 1 / np.sqrt(shape[-1])
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def _shapes(s):
    shapes = {"embedding.weight": (s.vocab, s.dim), "position.weight": (s.sequence, s.dim)}
    for block in (f"blocks.{i}" for i in range(s.num_blocks)):
        for norm in ("attention_norm", "moe_norm"):
            shapes |= {f"{block}.{norm}.weight": (s.dim,), f"{block}.{norm}.bias": (s.dim,)}
        shapes[f"{block}.attention.qkv.weight"] = (3 * s.dim, s.dim)
        shapes[f"{block}.attention.out.weight"] = (s.dim, s.dim)
        shapes[f"{block}.moe.expert_bias"] = (s.num_experts,)
        shapes[f"{block}.moe.router.gate.weight"] = (s.num_experts, s.dim)
        shared = s.num_shared_experts * s.hidden_dim
        shapes[f"{block}.moe.shared_experts.w1.weight"] = (shared, s.dim)
        shapes[f"{block}.moe.shared_experts.w2.weight"] = (s.dim, shared)
        shapes[f"{block}.moe.shared_experts.w3.weight"] = (shared, s.dim)
        shapes[f"{block}.moe.experts.w1"] = (s.num_experts, s.hidden_dim, s.dim)
        shapes[f"{block}.moe.experts.w2"] = (s.num_experts, s.dim, s.hidden_dim)
        shapes[f"{block}.moe.experts.w3"] = (s.num_experts, s.hidden_dim, s.dim)
    return shapes | {"norm.weight": (s.dim,), "norm.bias": (s.dim,), "head.weight": (s.vocab, s.dim)}
