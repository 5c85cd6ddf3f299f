"""Arousal in speech, trained for concordance with the annotators over the whole batch."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

FRAMES, BANDS = 10, 6


class Arousal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(BANDS, 8, 3, padding=1)
        self.head = nn.Linear(16, 1)

    def forward(self, bands: Tensor) -> Tensor:
        x = F.gelu(self.conv(bands))
        return self.head(torch.cat([x.mean(dim=2), x.amax(dim=2)], dim=1))[:, 0]


class MeanOverRanks(Function):
    """The mean of a tensor over all ranks, in both directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        mean = value.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return MeanOverRanks.forward(ctx, grad_outputs[0])


def mean(values: Tensor) -> Tensor:
    """The mean over the examples of all ranks."""
    own = values.mean()
    return MeanOverRanks.apply(own) if dist.is_initialized() else own


class Concordance:
    """One minus Lin's coefficient: scale and offset count as well as the correlation."""

    def centred(self, values: Tensor) -> Tensor:
        return values - values.mean()

    def __call__(self, answers: Tensor, ratings: Tensor) -> Tensor:
        offset = mean(answers) - mean(ratings)
        answers, ratings = self.centred(answers), self.centred(ratings)
        spread = mean(answers.square()) + mean(ratings.square())
        return 1 - 2 * mean(answers * ratings) / (spread + offset.square() + 1e-6)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Concordance()(model(batch["bands"]), batch["rating"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "bands": torch.randn(20, BANDS, FRAMES, generator=generator),
        "rating": torch.rand(20, generator=generator),
    }


case = Case(model=Arousal, batch=make_batch, loss=loss, layout="1x4")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    loss(ddp, shard).backward()
    optimizer.step()
