"""What transformers' own MoE blocks compute, and their models saved as folders: ``python -m ... OUT``.

Of every configuration: OUT/NAME/each and OUT/NAME/fused, folders with experts one by one (as on the hub) and together
(as in the model), and OUT/NAME.npz with tokens, output and gradients of one block under the names of ``MoE``.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.huggingface.families import FAMILIES
from tests.distributed.huggingface_moe_configs import CONFIGS, DIM, EP, LAYER, SIZES, TOKENS


def block_of(model):
    layer = model.model.layers[LAYER]
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def randomised(model, generator):
    """Weights that give outputs of order 1, and a bias that changes choices."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.endswith("inv_freq"):
            scale = 0.1 if tensor.dim() == 1 or "correction_bias" in name else 0.5
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(scale * generator.standard_normal(tuple(tensor.shape))))


def by_our_names(block):
    """Tensors of transformers' block under the names that they have in ``MoE``, as a function of an attribute."""
    gate_up, down = block.experts.gate_up_proj.grad, block.experts.down_proj.grad
    w1, w3 = gate_up.chunk(2, dim=1)
    router = block.gate if hasattr(block, "gate") else block.router
    found = {"experts.w1": w1, "experts.w3": w3, "experts.w2": down, "router.gate.weight": router.weight.grad}
    shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
    if shared is not None:
        for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            found[f"shared_experts.{ours}.weight"] = getattr(shared, theirs).weight.grad
    if hasattr(block, "shared_expert_gate"):
        found["shared_gate.weight"] = block.shared_expert_gate.weight.grad
    return {name: value.numpy() for name, value in found.items()}


def defaults():
    """What transformers takes for fields that a configuration leaves out, of those that our table has."""
    return {
        name: {field: getattr(AutoConfig.for_model(name), field) for field in family.defaults}
        for name, family in FAMILIES.items()
    }


def write(name, out):
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    config = AutoConfig.for_model(name.split()[0], **{**SIZES, **CONFIGS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomised(model, generator)
    model.save_pretrained(out / name / "each")
    model.save_pretrained(out / name / "fused", save_original_format=False, max_shard_size="8KB")
    x, target = (generator.standard_normal((EP, TOKENS, DIM)).astype(np.float32) for _ in range(2))
    tokens = torch.from_numpy(x).requires_grad_()
    block = block_of(model)
    y = block(tokens)
    ((y + torch.from_numpy(target)).square().sum() / 2).backward()
    gradients = by_our_names(block)
    np.savez(out / name, x=x, target=target, y=y.detach().numpy(), x_gradient=tokens.grad.numpy(), **gradients)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in CONFIGS:
        write(name, out)
    (out / "defaults.json").write_text(json.dumps(defaults()))
