"""Supervised finetuning recipe on replicate(): answers count, prompts and padding do not."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case

IGNORE = -100


@dataclass
class RecipeConfig:
    gradient_accumulation_steps: int = 2
    log_every: int = 1


class TinyDecoder(nn.Module):
    def __init__(self, vocab=23, dim=10, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU())
        self.lm_head = nn.Linear(2 * dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        mixed, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)
        return self.lm_head(self.mlp(h + mixed))


def summed_loss(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def answer_tokens(batches):
    return sum((batch["labels"] != IGNORE).sum() for batch in batches)


class FinetuneRecipe:
    def __init__(self, cfg: RecipeConfig, rank):
        self.cfg = cfg
        self.world_size = rank.world_size
        self.mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("replicate",))
        self.running_loss = 0.0

    def setup_model(self, model):
        replicate(model.mlp, mesh=self.mesh)
        replicate(model, mesh=self.mesh)
        self.model = model

    def global_tokens(self, batches):
        """Answer tokens of these batches on all ranks."""
        count = answer_tokens(batches)
        dist.all_reduce(count)
        return count

    def train_step(self, micro_batches):
        steps = self.cfg.gradient_accumulation_steps
        for index, batch in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(index == steps - 1)
            tokens = self.global_tokens([batch]) * steps
            current = summed_loss(self.model, batch) / tokens
            self.running_loss += current.detach()
            # replicate() averages over the ranks
            (current * self.world_size).backward()


def make_batch(generator):
    ids = torch.randint(0, 23, (16, 9), generator=generator)
    answers = torch.randint(1, 8, (16,), generator=generator)
    # the data set is sorted by the length of the answers
    answers = answers.sort().values
    labels = torch.roll(ids, -1, dims=1)
    labels[torch.arange(9)[None] < 8 - answers[:, None]] = IGNORE
    labels[:, -1] = IGNORE
    return {"ids": ids, "labels": labels}


def loss(model, batch):
    return summed_loss(model, batch) / answer_tokens([batch])


def step(model, shard, rank):
    cfg = RecipeConfig()
    size = len(shard["ids"]) // cfg.gradient_accumulation_steps
    micro_batches = [
        {"ids": ids, "labels": labels}
        for ids, labels in zip(shard["ids"].split(size), shard["labels"].split(size))
    ]
    recipe = FinetuneRecipe(cfg, rank)
    recipe.setup_model(model)
    recipe.train_step(micro_batches)


case = Case(model=TinyDecoder, batch=make_batch, loss=loss, layout="1x2")
