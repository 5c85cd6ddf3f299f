"""Phone recogniser: a small GRU over filterbanks, trained with CTC.

The objective is the negative log likelihood per phone, over the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PHONES, MELS, FRAMES, MAX_PHONES = 9, 6, 18, 7


class Objective(NamedTuple):
    nll: Tensor  # summed over the utterances
    phones: Tensor  # how many there are


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(MELS, 10, kernel_size=3, padding=1)
        self.rnn = nn.GRU(10, 10, batch_first=True)
        self.out = nn.Linear(10, PHONES + 1)

    def forward(self, mels: Tensor) -> Tensor:
        h = self.subsample(mels.transpose(1, 2)).transpose(1, 2).relu()
        h, _ = self.rnn(h)
        return self.out(h).log_softmax(-1)


def ctc(model: nn.Module, batch: dict[str, Tensor]) -> Objective:
    log_probs = model(batch["mels"]).transpose(0, 1)
    nll = F.ctc_loss(
        log_probs,
        batch["phones"],
        batch["frames"],
        batch["length"],
        blank=0,
        reduction="sum",
        zero_infinity=True,
    )
    return Objective(nll, batch["length"].sum())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    objective = ctc(model, batch)
    return objective.nll / objective.phones


def utterances(g: torch.Generator) -> dict[str, Tensor]:
    n = 8
    return {
        "mels": torch.randn(n, FRAMES, MELS, generator=g),
        "phones": torch.randint(1, PHONES + 1, (n, MAX_PHONES), generator=g),
        # sorted by length, as the bucketing sampler does
        "length": torch.randint(2, MAX_PHONES + 1, (n,), generator=g).sort().values,
        "frames": torch.full((n,), FRAMES),
    }


case = Case(model=Recogniser, batch=utterances, loss=loss, layout="1x2")


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DDP(model)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        nll, phones = ctc(self.ddp, batch)
        denominator = phones.to(nll.dtype)
        dist.all_reduce(phones)
        per_phone = nll / denominator * dist.get_world_size()
        per_phone.backward()
        return per_phone.detach()


def step(model, shard, rank):
    # 2 / (a + b) on either rank: the world size cancels DDP's division
    Trainer(model)(shard)
