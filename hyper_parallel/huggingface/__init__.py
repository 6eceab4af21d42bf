"""Hugging Face models: their configurations and their weights.

    from hyper_parallel import huggingface

    moe = huggingface.moe_from_config("Qwen3-30B-A3B/config.json")
    ExpertTensorParallel().apply(moe.experts, mesh)
    huggingface.load_moe(moe, "Qwen3-30B-A3B", layer=3)

    huggingface.load_pretrained(model, "Qwen3-30B-A3B")    # a whole model of transformers, cut or not
    huggingface.save_pretrained(model, "finetuned")

See docs/huggingface_moe.md and docs/huggingface.md. Nothing here imports a framework, transformers or safetensors.
"""

from hyper_parallel.huggingface.loading import load_pretrained
from hyper_parallel.huggingface.moe import load_moe, moe_from_config
from hyper_parallel.huggingface.saving import save_pretrained

__all__ = ["load_moe", "load_pretrained", "moe_from_config", "save_pretrained"]
