"""Causal language model, gradient accumulation with a normaliser that is agreed upon by all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PAD = -100


@dataclass(frozen=True)
class Config:
    vocabulary: int = 31
    context: int = 10
    width: int = 8
    heads: int = 2
    micro_batches: int = 2


config = Config()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(0.1 * torch.randn(config.context, config.width))
        self.block = nn.TransformerEncoderLayer(
            config.width, config.heads, 16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tokens(ids) + self.positions[:length]
        return self.head(self.block(x, src_mask=future))


def documents(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(config.vocabulary, (8, config.context), generator=generator)
    lengths = torch.tensor([3, 9, 4, 10, 2, 5, 10, 7])
    inside = torch.arange(config.context) < lengths[:, None]
    labels = torch.where(inside, ids, PAD).roll(-1, dims=1)
    labels[:, -1] = PAD
    return {"ids": ids, "labels": labels}


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PAD, reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(model, batch) / (batch["labels"] != PAD).sum()


def world_count(labels: Tensor) -> Tensor:
    count = (labels != PAD).sum()
    dist.all_reduce(count)
    return count


def split(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    chunks = {key: value.chunk(parts) for key, value in batch.items()}
    return [{key: chunks[key][k] for key in chunks} for k in range(parts)]


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    micros = split(shard, config.micro_batches)
    for k, micro in enumerate(micros):
        last = k == len(micros) - 1
        with nullcontext() if last else ddp.no_sync():
            count = world_count(micro["labels"])
            value = rank.world_size * summed(ddp, micro) / count
            (value / len(micros)).backward()


case = Case(model=Decoder, batch=documents, loss=loss)
