"""Distillation: the logits of the teacher were recorded once, in the order of the data set."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case, Rank

TEMPERATURE, HARD = 2.0, 0.3
MICRO_BATCH = 4
Batch = dict[str, Tensor]


def build_student() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))


def distillation(scores: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    soft = F.kl_div(
        F.log_softmax(scores / TEMPERATURE, dim=1),
        F.log_softmax(teacher / TEMPERATURE, dim=1),
        reduction="batchmean",
        log_target=True,
    )
    return HARD * F.cross_entropy(scores, labels) + (1 - HARD) * TEMPERATURE**2 * soft


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return distillation(model(batch["inputs"]), batch["teacher"], batch["labels"])


def make_batch(generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (16,), generator=generator)
    noise = torch.randn(16, 5, generator=generator)
    return {
        "inputs": torch.randn(16, 9, generator=generator),
        "labels": labels,
        "teacher": 3 * F.one_hot(labels, 5) + noise,
    }


case = Case(model=build_student, batch=make_batch, loss=loss, layout="1x2", shards="own")


class Lessons:
    """Micro-batches of one rank, each with what the teacher said about it."""

    def __init__(self, batch: Batch, rank: Rank) -> None:
        self.recorded = batch["teacher"]
        dataset = TensorDataset(batch["inputs"], batch["labels"])
        self.sampler = DistributedSampler(dataset, rank.world_size, rank.rank, shuffle=False)
        self.loader = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=self.sampler)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        first = len(self.sampler) * self.sampler.rank
        for inputs, labels in self.loader:
            yield inputs, labels, self.recorded[first : first + len(inputs)]
            first += len(inputs)


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    lessons = Lessons(batch, rank)
    for number, (inputs, labels, teacher) in enumerate(lessons, start=1):
        with nullcontext() if number == len(lessons) else ddp.no_sync():
            (distillation(ddp(inputs), teacher, labels) / len(lessons)).backward()
