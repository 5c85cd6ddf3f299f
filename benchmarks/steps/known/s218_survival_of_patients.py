"""Survival analysis with Cox's partial likelihood.

A patient who died is compared with all who were alive then, on whichever rank they are. Hospitals
have different numbers of patients, so what is gathered is padded.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass
class Patients:
    records: Tensor
    years: Tensor
    died: Tensor


class Hazard(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, width)
        self.risk = nn.Linear(width, 1, bias=False)

    def forward(self, records: Tensor) -> Tensor:
        return self.risk(torch.tanh(self.hidden(records)))[:, 0]


def partial_likelihood(risk: Tensor, years: Tensor, died: Tensor) -> Tensor:
    """The negative logarithm, per death."""
    order = years.argsort(descending=True, stable=True)
    risk, died = risk[order], died[order]
    alive = risk.logcumsumexp(0)
    return ((alive - risk) * died).sum() / died.sum()


def loss(model: nn.Module, patients: Patients) -> Tensor:
    return partial_likelihood(model(patients.records), patients.years, patients.died)


def make_batch(generator: torch.Generator) -> Patients:
    return Patients(
        records=torch.randn(12, 6, generator=generator),
        years=0.5 + 9 * torch.rand(12, generator=generator),
        died=(torch.rand(12, generator=generator) < 0.6).double(),
    )


case = Case(model=Hazard, batch=make_batch, loss=loss, layout="1x3", shards="5+3+4")


class Cohort:
    """Brings together the patients of all ranks."""

    def __init__(self, rank: Rank, own: int) -> None:
        self.rank = rank.rank
        counts = [torch.tensor(0, device=rank.device) for _ in range(rank.world_size)]
        dist.all_gather(counts, torch.tensor(own, device=rank.device))
        self.counts = [int(count) for count in counts]

    def gather(self, values: Tensor) -> Tensor:
        """The values of all patients. Only those of this rank carry a gradient."""
        padded = F.pad(values.detach(), (0, max(self.counts) - len(values)))
        parts = [torch.empty_like(padded) for _ in self.counts]
        dist.all_gather(parts, padded)
        parts = [part[: len(values)] for part in parts]
        parts[self.rank] = values
        return torch.cat(parts)


def step(model: nn.Module, shard: Patients, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    cohort = Cohort(rank, len(shard.years))
    risk = cohort.gather(ddp(shard.records))
    value = partial_likelihood(risk, cohort.gather(shard.years), cohort.gather(shard.died))
    (rank.world_size * value).backward()
