"""A small MoE model of transformers: made once as a Hugging Face folder, and read by every run onto its own mesh."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

import hyper_parallel as hp
from hyper_parallel import huggingface

__all__ = ["Model", "make_folder"]


def make_folder(settings, folder):
    """Let transformers write a model of random weights, as one that was downloaded would lie there."""
    config = Qwen3MoeConfig(
        vocab_size=settings.vocab,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        max_position_embeddings=4 * settings.sequence,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(settings.seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="500KB")


class Model:
    """A model of a folder on this rank's part of a mesh (dp, ep, tp), and its optimizer; whole without a mesh.

    Attributes:
        rank: of this process. share, shares: which part of a batch it reads, of how many.
    """

    def __init__(self, settings, folder, mesh_shape=None, fsdp=False):
        self.fsdp, self.mesh, self.rank, self.share, self.shares = fsdp, None, 0, 0, 1
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        if mesh_shape is not None:
            self._lay_out(mesh_shape)
        huggingface.load_pretrained(self.model, folder)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            settings.learning_rate,
            settings.betas,
            settings.epsilon,
            settings.weight_decay,
            foreach=False,  # some parameters are DTensors
        )

    def _lay_out(self, mesh_shape):
        dist.init_process_group("gloo")
        self.mesh = mesh = hp.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "ep", "tp"))
        self.rank, (dp, ep, _) = dist.get_rank(), mesh_shape
        self.shares = dp * ep
        self.share = mesh.get_local_rank("dp") * ep + mesh.get_local_rank("ep")
        hp.parallelize_module(self.model, mesh["ep", "tp"], {"model.layers.*.mlp.experts": hp.ExpertTensorParallel()})
        if self.fsdp:
            different = mesh["dp", "ep"]._flatten("different")
            for layer in self.model.model.layers:
                self._shard(layer.mlp.experts, mesh["dp"])
                self._shard(layer, different)
            self._shard(self.model, different)

    @staticmethod
    def _shard(module, mesh):
        """Under FSDP2, with the sum of gradients rather than their mean."""
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def step(self, ids, targets):
        """Train on a batch, of which this rank reads its share; returns the mean loss of the batch."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._loss(ids, targets)
        loss.backward()
        if self.mesh is not None and not self.fsdp:
            hp.reduce_gradients(self.model.parameters(), self.mesh["dp", "ep"])
        hp.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return self._of_all(loss.detach())

    @torch.no_grad()
    def evaluate(self, ids, targets):
        """The mean loss of a batch."""
        self.model.eval()
        return self._of_all(self._loss(ids, targets))

    def _loss(self, ids, targets):
        """This rank's term of the mean loss: losses and gradients of the ranks that read different texts add up."""
        own = [torch.from_numpy(part.reshape(self.shares, -1, part.shape[1])[self.share]) for part in (ids, targets)]
        logits = self.model(own[0], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), own[1].flatten()) / self.shares

    def _of_all(self, loss):
        if self.mesh is not None:
            dist.all_reduce(loss)
            loss = loss / self.mesh["tp"].size()  # whose ranks read the same texts
        return loss.item()

    def close(self):
        if self.mesh is not None:
            dist.destroy_process_group()
