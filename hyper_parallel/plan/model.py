"""The sizes of a Mixture-of-Experts language model, as far as memory, bytes and flops depend on them.

D model size, H hidden size of one expert, E experts, K experts per token, V vocabulary. Counts of numbers, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attention", "Model", "grouped_attention", "latent_attention"]


@dataclass(frozen=True)
class Attention:
    """One attention block.

    Attributes:
        head_parameters: weights that belong to single heads, which tensor parallelism could split.
        other_parameters: the rest: down-projections, norms of q and k, biases of the output.
        matrix_parameters: of both, those in matrix products: 2 flops each per token.
        kept_width: numbers per token kept for backward, flash attention assumed: q, k, v, output, and what is normed.
        score_width: sum over heads of the sizes of a query and of a value: 2 flops each per token and position.
        num_heads: heads, each with one fp32 log-sum per token.
    """

    head_parameters: int
    other_parameters: int
    matrix_parameters: int
    kept_width: int
    score_width: int
    num_heads: int

    @property
    def parameters(self) -> int:
        return self.head_parameters + self.other_parameters


@dataclass(frozen=True)
class Model:
    """A model of ``num_dense_layers`` dense and ``num_moe_layers`` MoE layers with the same attention in all of them.

    Attributes:
        expert_numbers: numbers of an expert that are not in its three matrices and are split over tp (biases of gate
            and up), and
        whole_expert_numbers: those that every tp rank holds (bias of the output).
        router_numbers: parameters of one router.
        shared_hidden_dim: hidden size of the shared experts together, 0 for none.
        shared_gate: parameters of a gate on the shared expert's output.
        dense_hidden_dim: hidden size of the dense layers' SwiGLU.
        layer_norms, final_norms: parameters of the norms of one layer, and of the last one.
        head_numbers: parameters of the output layer beside the matrix (its bias).
        notes: what the configuration says that the numbers do not contain.
    """

    name: str
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    num_dense_layers: int
    attention: Attention
    vocab_size: int
    tied_embeddings: bool = False
    shared_hidden_dim: int = 0
    shared_gate: int = 0
    dense_hidden_dim: int = 0
    router_numbers: int = 0
    expert_numbers: int = 0
    whole_expert_numbers: int = 0
    layer_norms: int = 0
    final_norms: int = 0
    head_numbers: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.num_moe_layers + self.num_dense_layers

    def expert_parameters(self, ep: int = 1, tp: int = 1) -> int:
        """Parameters of the routed experts of all layers that one rank of ep x tp holds."""
        of_one = (3 * self.dim * self.hidden_dim + self.expert_numbers) // tp + self.whole_expert_numbers
        return self.num_moe_layers * (self.num_experts // ep) * of_one

    def shared_parameters(self, tp: int = 1) -> int:
        """Parameters of the shared experts, split over tp along their hidden dim, with the gates, which are not."""
        return self.num_moe_layers * (3 * self.dim * self.shared_hidden_dim // tp + self.shared_gate)

    def dense_parameters(self) -> int:
        """Everything else: embedding, attention, norms, routers, dense layers, output."""
        of_layers = self.num_layers * (self.attention.parameters + self.layer_norms)
        of_layers += self.num_dense_layers * 3 * self.dim * self.dense_hidden_dim
        of_layers += self.num_moe_layers * self.router_numbers
        tables = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return of_layers + tables + self.final_norms + self.head_numbers

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.expert_parameters() + self.shared_parameters() + self.dense_parameters()


def grouped_attention(
    dim: int, num_heads: int, num_kv_heads: int, head_dim: int, qkv_bias: bool, out_bias: bool, norms: str, sinks: bool
) -> Attention:
    """Attention whose keys and values are shared by groups of heads; ``norms`` of q and k: "", "head" or "all"."""
    width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    matrices = dim * (width + 2 * kv_width) + width * dim
    of_heads = matrices + (width + 2 * kv_width if qkv_bias else 0) + (num_heads if sinks else 0)
    of_norms = {"": 0, "head": 2 * head_dim, "all": width + kv_width}[norms]
    normed = width + kv_width if norms else 0
    kept = 2 * width + 2 * kv_width + normed
    return Attention(of_heads, of_norms + (dim if out_bias else 0), matrices, kept, 2 * width, num_heads)


def latent_attention(
    dim: int, num_heads: int, q_rank: int | None, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int, bias: bool
) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): q, and k with v, through a low rank; rope on its own."""
    qk_dim = nope_dim + rope_dim
    q_up = (q_rank or dim) * num_heads * qk_dim
    of_heads = q_up + kv_rank * num_heads * (nope_dim + v_dim) + num_heads * v_dim * dim
    down = dim * (q_rank or 0) + dim * (kv_rank + rope_dim)
    biases = ((q_rank or 0) + kv_rank + rope_dim + dim) if bias else 0
    # Low-rank q and kv before and after their norms; q, k, v of all heads; the output.
    kept = 2 * (q_rank or 0) + 2 * kv_rank + rope_dim + num_heads * (2 * qk_dim + 2 * v_dim)
    others = down + (q_rank or 0) + kv_rank + biases
    return Attention(of_heads, others, of_heads + down, kept, num_heads * (qk_dim + v_dim), num_heads)
