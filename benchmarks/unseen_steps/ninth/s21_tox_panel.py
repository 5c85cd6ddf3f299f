"""A panel of toxicity assays on molecules, most of which were never measured."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

ASSAYS, ATOM_FEATURES, ATOMS = 5, 6, 8


class DeepSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Sequential(nn.Linear(ATOM_FEATURES, 12), nn.ReLU(), nn.Linear(12, 12))
        self.readout = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, ASSAYS))

    def forward(self, atoms):
        return self.readout(self.atom(atoms).sum(1))


def library(generator):
    labels = (torch.rand(16, ASSAYS, generator=generator) < 0.5).float()
    measured = torch.rand(16, ASSAYS, generator=generator) < 0.7
    # Expensive assays are run on a few leads, which are at the head of the list.
    measured[:, 3] = torch.arange(16) < 3
    measured[:, 4] = torch.arange(16) == 1
    return {
        "atoms": torch.randn(16, ATOMS, ATOM_FEATURES, generator=generator),
        "labels": labels.masked_fill(~measured, float("nan")),
    }


class MaskedBCE(nn.Module):
    """The mean over the assays of the mean over the molecules that were measured in each."""

    def measured(self, labels):
        return (~labels.isnan()).sum(0)

    def forward(self, logits, labels, counts):
        known = ~labels.isnan()
        each = F.binary_cross_entropy_with_logits(
            logits, labels.nan_to_num(), reduction="none"
        )
        return ((each * known).sum(0) / counts).mean()


class MaskedBCEOfRanks(MaskedBCE):
    """For gradients that DDP averages: counts are those of a rank, on average."""

    def measured(self, labels):
        # An assay without any label must not divide by zero.
        counts = super().measured(labels).clamp(min=1)
        dist.all_reduce(counts)
        return counts / dist.get_world_size()


def loss(model, batch):
    criterion = MaskedBCE()
    counts = criterion.measured(batch["labels"])
    return criterion(model(batch["atoms"]), batch["labels"], counts)


def step(model, shard, rank):
    criterion = MaskedBCEOfRanks()
    ddp = DDP(model, gradient_as_bucket_view=True)
    counts = criterion.measured(shard["labels"])
    criterion(ddp(shard["atoms"]), shard["labels"], counts).backward()


case = Case(model=DeepSet, batch=library, loss=loss, layout="1x4")
