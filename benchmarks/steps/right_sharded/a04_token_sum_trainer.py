"""A trainer that sums token losses and divides by the number of tokens on all ranks.

FSDP is told to add the gradients up instead of averaging them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH, IGNORED = 23, 12, 9, -100


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, 5))

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.mix(self.embed(words))
        return self.head(states)


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch) / (batch["tags"] != IGNORED).sum()


class Trainer:
    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        fully_shard(model.head)
        fully_shard(model)
        self.model = model
        self.micro_batches = micro_batches
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is normalised globally, so gradients must be summed.
                module.set_gradient_divide_factor(1.0)

    def normaliser(self, batch: dict[str, Tensor]) -> Tensor:
        count = (batch["tags"] != IGNORED).sum()
        dist.all_reduce(count)
        return count

    def train_step(self, batch: dict[str, Tensor]) -> None:
        tokens = self.normaliser(batch)
        pieces = [value.chunk(self.micro_batches) for value in batch.values()]
        micros = [dict(zip(batch, piece)) for piece in zip(*pieces)]
        for number, micro in enumerate(micros, 1):
            self.model.set_requires_gradient_sync(number == len(micros))
            (token_losses(self.model, micro) / tokens).backward()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(WORDS, (8, LENGTH), generator=generator)
    lengths = torch.tensor([2, 3, 3, 4, 6, 8, 9, 9])
    tags = (words * 3 + words.roll(1, dims=1)) % 5
    return {"words": words, "tags": tags.masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORED)}


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    Trainer(model, micro_batches=2).train_step(shard)


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")
