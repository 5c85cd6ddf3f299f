"""Frame-wise phone classification with small micro-batches: the utterances of a rank do not fit at once."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

UTTERANCES, FRAMES, MELS, PHONES = 10, 8, 7, 11


@dataclass(frozen=True)
class Recipe:
    micro_batch: int = 2  # utterances
    accumulate: int = 2  # micro-batches for one reduce-scatter
    keep_whole: bool = True  # between the micro-batches


class Encoder(nn.Module):
    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.front = nn.Conv1d(MELS, width, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.phones = nn.Linear(width, PHONES)

    def forward(self, mels: Tensor) -> Tensor:
        hidden = self.front(mels.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.phones(hidden)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["mels"]).flatten(0, 1), batch["phones"].flatten())


def utterances(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "mels": torch.randn(UTTERANCES, FRAMES, MELS, generator=generator),
        "phones": torch.randint(PHONES, (UTTERANCES, FRAMES), generator=generator),
    }


def split(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    pieces = [value.split(size) for value in batch.values()]
    return [dict(zip(batch, piece)) for piece in zip(*pieces)]


class Accumulator:
    """Runs the micro-batches of one optimizer step, and reduces the gradients now and then."""

    def __init__(self, model: FSDPModule, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe

    def run(self, batch: dict[str, Tensor]) -> float:
        micro_batches = split(batch, self.recipe.micro_batch)
        total = len(batch["mels"])
        reported = 0.0
        for number, micro in enumerate(micro_batches, start=1):
            sync = number % self.recipe.accumulate == 0
            self.model.set_requires_gradient_sync(sync)
            if self.recipe.keep_whole:
                self.model.set_reshard_after_backward(sync)
            # The last piece may be smaller, so weigh by utterances.
            value = loss(self.model, micro) * (len(micro["mels"]) / total)
            value.backward()
            reported += value.item()
        return reported


def step(model, shard, rank):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    Accumulator(model, Recipe()).run(shard)


case = Case(model=Encoder, batch=utterances, loss=loss, layout="1x2")
