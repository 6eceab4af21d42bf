"""Hugging Face models: their configurations and their weights.

    from hyper_parallel import huggingface

    moe = huggingface.moe_from_config("Qwen3-30B-A3B/config.json")
    ExpertTensorParallel().apply(moe.experts, mesh)
    huggingface.load_moe(moe, "Qwen3-30B-A3B", layer=3)

See docs/huggingface_moe.md. Nothing here imports a framework, transformers or safetensors.
"""

from hyper_parallel.huggingface.moe import load_moe, moe_from_config

__all__ = ["load_moe", "moe_from_config"]
