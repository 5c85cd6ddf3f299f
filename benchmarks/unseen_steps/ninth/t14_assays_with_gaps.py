"""Toxicity of molecules in several assays, most of which were run on some molecules only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

MOLECULES, BITS = 24, 16
ASSAYS = {"liver": 0.9, "heart": 0.6, "skin": 0.3}  # how often an assay was run


class Assays(nn.Module):
    def __init__(self):
        super().__init__()
        self.fingerprint = nn.Sequential(nn.Linear(BITS, 10), nn.GELU())
        self.heads = nn.ModuleDict({name: nn.Linear(10, 1) for name in ASSAYS})

    def forward(self, bits):
        shared = self.fingerprint(bits)
        return {name: head(shared).squeeze(-1) for name, head in self.heads.items()}


def screening(generator):
    batch = {"bits": torch.randint(0, 2, (MOLECULES, BITS), generator=generator).double()}
    for name, coverage in ASSAYS.items():
        batch[f"{name}.toxic"] = torch.randint(0, 2, (MOLECULES,), generator=generator).double()
        batch[f"{name}.run"] = (torch.rand(MOLECULES, generator=generator) < coverage).double()
    return batch


def log_loss(logits, batch, name):
    return F.binary_cross_entropy_with_logits(
        logits, batch[f"{name}.toxic"], weight=batch[f"{name}.run"], reduction="sum"
    )


def loss(model, batch):
    logits = model(batch["bits"])
    return sum(log_loss(logits[name], batch, name) / batch[f"{name}.run"].sum() for name in ASSAYS)


def runs_of_an_average_rank(shard, world_size):
    runs = torch.stack([shard[f"{name}.run"].sum() for name in ASSAYS])
    dist.all_reduce(runs)
    return dict(zip(ASSAYS, runs / world_size))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    runs = runs_of_an_average_rank(shard, rank.world_size)
    logits = ddp(shard["bits"])
    total = 0.0
    for name in ASSAYS:
        # the loss stays a plain sum for the logs; each assay is normalised on the way back
        logits[name].register_hook(lambda slope: slope / runs[name])
        total = total + log_loss(logits[name], shard, name)
    total.backward()


case = Case(model=Assays, batch=screening, loss=loss, layout="1x2")
