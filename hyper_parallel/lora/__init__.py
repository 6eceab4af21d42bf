"""LoRA on experts that a style has sharded: a pair of small factors for each expert is trained, the model is frozen.

    import hyper_parallel.lora as lora

    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertTensorParallel()})
    lora.add_adapters(model, r=16, alpha=32)
    ...                                        # optimizer, training
    lora.save_adapters(model, "adapter")       # as PEFT writes and reads it
    lora.merge_adapters(model)                 # into the weights, on every rank's shards

See docs/lora.md. Nothing here imports a framework, transformers or peft.
"""

from hyper_parallel.lora.adapters import add_adapters, merge_adapters
from hyper_parallel.lora.folder import load_adapters, save_adapters

__all__ = ["add_adapters", "load_adapters", "merge_adapters", "save_adapters"]
