"""Bytes of one rank: parameters, gradients, optimizer states, activations, and buffers.

The dense part of the model (embedding, attention, norms, routers, dense layers, output) lies whole on every rank, as
the library leaves it; routed experts are split over ep and tp, shared experts over tp. Letters as in ``layer``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.plan.cluster import Cluster
from hyper_parallel.plan.layer import MoELayer, kept_bytes
from hyper_parallel.plan.model import Model

__all__ = ["OPTIMIZERS", "RECOMPUTE", "Memory", "Optimizer", "memory_of", "attention_kept_bytes", "hccl_buffers"]

RECOMPUTE = ("none", "moe", "full")
MIB = 2**20


@dataclass(frozen=True)
class Optimizer:
    """Bytes per parameter.

    Attributes:
        states: of the states; None for as many bytes as the parameter has, ``num_states`` times.
        master: of an fp32 copy of the parameter, where it is not fp32 itself.
        gradient: of its gradient; None for the parameter's own dtype.
    """

    num_states: int
    states: int | None = None
    master: bool = False
    gradient: int | None = None

    def state_bytes(self, itemsize: int) -> int:
        of_states = self.num_states * (itemsize if self.states is None else self.states)
        return of_states + (4 if self.master and itemsize < 4 else 0)

    def gradient_bytes(self, itemsize: int) -> int:
        return itemsize if self.gradient is None else self.gradient


OPTIMIZERS = {
    # Moments and a copy of the weights in fp32, gradients in the weights' dtype; with fp32 weights torch.optim.AdamW.
    "adamw": Optimizer(2, states=4, master=True),
    # torch.optim.AdamW as it comes: moments in the weights' dtype, no copy.
    "adamw-plain": Optimizer(2),
    # As Megatron's: fp32 moments, copy and gradients, 18 bytes per bf16 parameter in all.
    "adamw-fp32-gradients": Optimizer(2, states=4, master=True, gradient=4),
    # DeepSeek-V3, section 3.3.3: bf16 moments, fp32 copy and gradients.
    "adamw-bf16-moments": Optimizer(2, states=2, master=True, gradient=4),
    "momentum": Optimizer(1),
    "sgd": Optimizer(0),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``parameters`` holds ``expert_parameters``; ``total`` is the peak: all the others together."""

    expert_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory_of(
    model: Model, layer: MoELayer, cluster: Cluster, dp: int, recompute: str, optimizer: Optimizer, zero: int
) -> Memory:
    """The memory of the slowest rank.

    ``zero`` as in Rajbhandari et al. 2020, over the ranks that hold the same parameters and see different tokens (dp
    for experts, dp x ep for the rest): 1 divides optimizer states among them, 2 gradients too, 3 parameters too, with
    one layer at a time gathered.
    """
    b, replicas = layer.itemsize, {"experts": dp, "rest": dp * layer.ep}
    numbers = {
        "experts": model.expert_parameters(layer.ep, layer.tp),
        "rest": model.dense_parameters() + model.shared_parameters(layer.tp),
    }

    def held(of_one: int, divided: bool) -> int:
        return sum(-(-n // replicas[part]) * of_one if divided else n * of_one for part, n in numbers.items())

    of_experts = -(-numbers["experts"] // dp) if zero >= 3 else numbers["experts"]
    gathered = _one_layer(model, numbers) * b if zero >= 3 else 0
    return Memory(
        expert_parameters=of_experts * b,
        parameters=held(b, zero >= 3),
        gradients=held(optimizer.gradient_bytes(b), zero >= 2),
        optimizer=held(optimizer.state_bytes(b), zero >= 1),
        activations=activations(model, layer, recompute),
        buffers=gathered + working_bytes(layer) + hccl_buffers(layer, cluster, dp)["all"],
    )


def _one_layer(model: Model, numbers: dict[str, int]) -> int:
    """Parameters that ZeRO 3 gathers at a time: one layer, or the embedding if that is more."""
    of_experts = numbers["experts"] // max(1, model.num_moe_layers)
    rest = numbers["rest"] - 2 * model.vocab_size * model.dim
    return max(of_experts + max(0, rest) // model.num_layers, model.vocab_size * model.dim)


def activations(model: Model, layer: MoELayer, recompute: str) -> int:
    """Bytes kept between forward and backward. What is recomputed counts once: for one layer at a time.

    ``none`` keeps everything; ``moe`` keeps the input of every MoE layer instead of what is inside; ``full`` keeps the
    input of every layer. Under sequence parallel a rank holds 1/tp of the tokens between layers.
    """
    T, S, D, b = layer.num_tokens, layer.own_tokens, model.dim, layer.itemsize
    of_moe = kept_bytes(layer)
    of_dense = 3 * T * model.dense_hidden_dim * b if model.num_dense_layers else 0
    of_attention = attention_kept_bytes(model, T, S, b)
    outside = 3 * S * D * b + S * model.vocab_size * (b + 4)  # embedding, last norm, logits and their fp32 softmax
    if recompute == "full":
        return outside + model.num_layers * S * D * b + of_attention + max(of_moe, of_dense)
    moe = of_moe if recompute == "moe" else model.num_moe_layers * of_moe
    return outside + model.num_layers * of_attention + model.num_dense_layers * of_dense + moe


def attention_kept_bytes(model: Model, num_tokens: int, own_tokens: int, itemsize: int) -> int:
    """Of one layer, without its MLP: the inputs and outputs of two norms, of the tokens that a rank holds there, and
    attention over all tokens without its scores (flash attention: Dao 2023), which keeps the log of each row's sum in
    fp32."""
    attention = model.attention
    of_token = attention.kept_width * itemsize + 4 * attention.num_heads
    return num_tokens * of_token + own_tokens * 4 * model.dim * itemsize


def working_bytes(layer: MoELayer) -> int:
    """What backward of one MoE layer holds beside what was kept: gradients of the rows on both sides of an exchange,
    and of gate and up, with the product formed again."""
    rows = layer.arriving_rows
    return (2 * rows * layer.dim + 3 * rows * layer.hidden_dim // layer.tp) * layer.itemsize


def hccl_buffers(layer: MoELayer, cluster: Cluster, dp: int) -> dict[str, int]:
    """Buffer of each group in bytes, of the size to set, and of all of them ("all"); 0 where the backend has none.

    Whole MiB that hold one exchange of rows, in or out, whichever is more; below, an all-to-all of uneven sizes becomes
    slower (CANN, ``HCCL_BUFFSIZE``). Not less than the default.
    """
    if not cluster.buffer_bytes:
        return {"ep": 0, "tp": 0, "dp": 0, "all": 0}
    rows = max(layer.rows, layer.arriving_rows) * layer.dim * layer.itemsize
    # All-reduces work in pieces and need no more than the default.
    exchanged = {"ep": rows // layer.tp, "tp": rows} if layer.splits else {"ep": rows}
    sizes = {}
    for axis, degree in (("ep", layer.ep), ("tp", layer.tp), ("dp", dp)):
        needed = -(-exchanged.get(axis, 0) // MIB) * MIB
        sizes[axis] = max(cluster.buffer_bytes, needed) if degree > 1 else 0
    world = cluster.buffer_bytes
    return {**sizes, "all": cluster.buffer_copies * (sum(sizes.values()) + world)}
