"""TorchTitan's Llama 4 under its own plan, with our style in place of its own, against one device."""

import copy

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hyper_parallel as hp
from tests.harness import oracle
from tests.peers import torchtitan

# The edits of docs/torchtitan.md to the text of models/llama4/infra/parallelize.py.
STYLE = (
    ("import torch.nn as nn\n", "import torch.nn as nn\nimport hyper_parallel\n"),
    ("experts_plan = ExpertTensorParallel()", 'experts_plan = hyper_parallel.ExpertTensorParallel(tp_axis="etp")'),
)
COMPLETE = (
    ("output_layouts=(Partial(),)", "output_layouts=(Replicate(),)"),
    ("output_layouts=Partial()", "output_layouts=Replicate()"),
)


def against_one_device(context, with_style_alone=False):
    """Errors of loss and logits and of all gradients by name, on meshes ("dp", "tp") and ("ep", "etp") of 2 x 2."""
    hp.set_platform("torch")
    llama4 = torchtitan.load_llama4(STYLE if with_style_alone else STYLE + COMPLETE)
    moe_args = llama4.MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, use_grouped_mm=False)
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "vocab_size": 32, "multiple_of": 4, "max_seq_len": 16}
    torch.manual_seed(0)
    one = llama4.Transformer(llama4.TransformerModelArgs(**sizes, moe_args=moe_args))
    with torch.no_grad():  # of order 1, where TorchTitan's own are 0.02
        for name, parameter in one.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    one.tokens = torch.randint(32, (2, 3, 8))  # of each dp rank
    model = copy.deepcopy(one)

    dense = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    llama4.apply_non_moe_tp(model, dense["tp"], loss_parallel=False, enable_float8_tensorwise_tp=False)
    llama4.apply_moe_ep_tp(model, dense["tp"], sparse["ep"], sparse["etp"], sparse)
    dp_rank = dense.get_local_rank("dp")
    with torchtitan.integer_histc():
        logits, loss = _step(model, one.tokens[dp_rank])
        whole_logits, whole_loss = _step(one, one.tokens.flatten(0, 1))
    hp.reduce_gradients(model.parameters(), dense["dp"])
    dist.all_reduce(loss, group=dense.get_group("dp"))

    errors = {
        "loss": oracle.relative_error(loss.numpy(), whole_loss.numpy()),
        "logits": oracle.relative_error(logits.numpy(), whole_logits.view(2, 3, 8, 32)[dp_rank].numpy()),
    }
    for (name, parameter), (_, expected) in zip(model.named_parameters(), one.named_parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        errors[name] = oracle.relative_error(gradient.numpy(), expected.grad.numpy())
    return errors


def _step(model, tokens):
    """Logits and loss, of which the gradients are taken."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, -1).flatten(), reduction="sum") / 48
    loss.backward()
    return logits.detach(), loss.detach()
