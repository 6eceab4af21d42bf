"""Sizes and learning rate: the same for every run, so that their curves can be laid over one another."""

from dataclasses import dataclass

__all__ = ["Settings", "SETTINGS"]


@dataclass(frozen=True)
class Settings:
    vocab: int = 97  # see data.py
    dim: int = 96
    num_heads: int = 4
    num_blocks: int = 2
    hidden_dim: int = 192  # of one expert
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 1
    route_scale: float = 0.3  # of the routed experts' output
    bias_update_rate: float = 0.003  # balances the experts' load
    sequence: int = 64
    batch: int = 16  # sequences per step, over all ranks
    learning_rate: float = 2e-3
    betas: tuple = (0.9, 0.95)
    # Rounding may send a token whose experts score alike elsewhere. Adam divides by the size of past gradients, so that
    # an expert with few tokens answers such a token with a whole step, and the curves part; a large epsilon, and a
    # shared expert beside routed ones of small scale, keep the answer in proportion.
    epsilon: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 2

    @property
    def tokens(self):
        """Tokens per step, over all ranks."""
        return self.batch * self.sequence


SETTINGS = Settings()
