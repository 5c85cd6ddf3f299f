"""Trains a tagger on padded sentences with smoothed labels: sums, divided by the sample size."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

TAGS = 6
PAD = TAGS
SMOOTHING = 0.2

Batch = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 12)
        self.mix = nn.Conv1d(12, 12, kernel_size=3, padding=1)
        self.out = nn.Linear(12, TAGS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        return self.out(torch.tanh(self.mix(hidden.mT).mT) + hidden)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    features, tags = batch
    scores = model(features).flatten(0, 1)
    return F.cross_entropy(scores, tags.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)


def make_batch(generator: torch.Generator) -> Batch:
    features = torch.randn(12, 8, 5, generator=generator)
    tags = torch.randint(0, TAGS, (12, 8), generator=generator)
    lengths = torch.randint(3, 9, (12, 1), generator=generator)
    return features, tags.masked_fill(torch.arange(8) >= lengths, PAD)


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


class SmoothedCriterion:
    """The smoothed loss as a sum over tokens, with the number of these tokens."""

    def __init__(self, epsilon: float, padding: int) -> None:
        self.epsilon = epsilon
        self.padding = padding

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        features, tags = batch
        log_probs = model(features).log_softmax(dim=-1)
        padded = tags.eq(self.padding)
        index = tags.masked_fill(padded, 0).unsqueeze(-1)
        nll = -log_probs.gather(-1, index).squeeze(-1)
        smooth = -log_probs.sum(dim=-1)
        nll = nll.masked_fill(padded, 0.0).sum()
        smooth = smooth.masked_fill(padded, 0.0).sum()
        each = self.epsilon / (log_probs.size(-1) - 1)
        return (1.0 - self.epsilon) * nll + each * smooth, (~padded).sum()


class Trainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.criterion = SmoothedCriterion(SMOOTHING, PAD)
        self.world_size = world_size

    def multiply_gradients(self, factor: float) -> None:
        for parameter in self.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def train_step(self, batch: Batch) -> None:
        value, sample_size = self.criterion(self.ddp, batch)
        value.backward()
        dist.all_reduce(sample_size)
        self.multiply_gradients(self.world_size / sample_size.item())


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Trainer(model, rank.world_size).train_step(shard)
