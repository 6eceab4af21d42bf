"""Which tensors of a Hugging Face folder make up the weights of a ``MoE``.

Letters: E experts, H hidden size of one, S of the shared expert, D model size.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.huggingface.families import LLAMA, Family

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True)
class Part:
    """A stored tensor as a box beside a weight of the layer.

    Attributes:
        tensor: its name in the folder.
        whole: shape of the weight.
        offsets: where the box begins in the weight; before it, where the box holds something else first.
        shape: of the box.
    """

    tensor: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def parts_of(family: Family, arguments: Mapping[str, Any], block: str, stored: Container[str]) -> dict[str, list[Part]]:
    """The parts of every weight, by the weight's name in the layer.

    Args:
        arguments: of ``moe_arguments``. block: dotted name of the MoE block. stored: names of the folder.
    """
    dim, num_experts = arguments["dim"], arguments["num_experts"]
    parts = {"router.gate.weight": _one(block, family.router, stored, num_experts, dim)}
    parts |= _experts(family, block, stored, num_experts, arguments["hidden_dim"], dim)
    if family.bias:
        parts["expert_bias"] = _one(block, family.bias, stored, num_experts)
    if arguments["num_shared_experts"]:
        shared_dim = arguments["num_shared_experts"] * arguments["hidden_dim"]
        gate, up, down = ([f"{family.shared}.{name}"] for name in LLAMA)
        parts["shared_experts.w1.weight"] = _one(block, gate, stored, shared_dim, dim)
        parts["shared_experts.w3.weight"] = _one(block, up, stored, shared_dim, dim)
        parts["shared_experts.w2.weight"] = _one(block, down, stored, dim, shared_dim)
    if arguments["shared_gate"]:
        parts["shared_gate.weight"] = _one(block, [family.shared_gate], stored, 1, dim)
    return parts


def _one(block: str, names: Sequence[str], stored: Container[str], *shape: int) -> list[Part]:
    """A weight that is one tensor, under the first of its names that is there."""
    full = [f"{block}.{name}" for name in names]
    tensor = next((name for name in full if name in stored), full[0])
    return [Part(tensor, shape, (0,) * len(shape), shape)]


def _experts(
    family: Family, block: str, stored: Container[str], num_experts: int, hidden_dim: int, dim: int
) -> dict[str, list[Part]]:
    wide, high = (num_experts, hidden_dim, dim), (num_experts, dim, hidden_dim)
    for both, down in ([f"{block}.{name}" for name in names] for names in family.fused):
        if both in stored or down in stored:
            # [E, 2H, D]: gate above up. Seen from up, the tensor begins H rows earlier.
            gate_and_up = (num_experts, 2 * hidden_dim, dim)
            return {
                "experts.w1": [Part(both, wide, (0, 0, 0), gate_and_up)],
                "experts.w3": [Part(both, wide, (0, -hidden_dim, 0), gate_and_up)],
                "experts.w2": [Part(down, high, (0, 0, 0), high)],
            }
    gate, up, down = family.each

    def each(name: str, whole: tuple[int, ...]) -> list[Part]:
        return [Part(f"{block}.experts.{e}.{name}", whole, (e, 0, 0), (1, *whole[1:])) for e in range(num_experts)]

    return {"experts.w1": each(gate, wide), "experts.w3": each(up, wide), "experts.w2": each(down, high)}
