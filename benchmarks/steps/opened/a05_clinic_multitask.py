"""Two heads for patients: length of stay (regression) and diagnosis (classes).

Many labels are missing, and not the same ones for both heads.  Missing stay is NaN,
missing diagnosis is -1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PATIENTS, VITALS, DIAGNOSES = 16, 6, 5
STAY_WEIGHT, DIAGNOSIS_WEIGHT = 0.25, 1.0


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(VITALS, 20), nn.GELU(), nn.Linear(20, 10), nn.GELU())
        self.stay = nn.Linear(10, 1)
        self.diagnosis = nn.Linear(10, DIAGNOSES)

    def forward(self, vitals):
        h = self.trunk(vitals)
        return self.stay(h).squeeze(-1), self.diagnosis(h)


def patients(g):
    vitals = torch.randn(PATIENTS, VITALS, generator=g)
    stay = torch.randn(PATIENTS, generator=g)
    stay[torch.tensor([1, 2, 6, 8, 9, 13])] = float("nan")
    diagnosis = torch.randint(0, DIAGNOSES, (PATIENTS,), generator=g)
    diagnosis[torch.tensor([0, 5, 15])] = -1
    return {"vitals": vitals, "stay": stay, "diagnosis": diagnosis}


def sums(model, batch):
    """(sum, valid) of each head."""
    stay, diagnosis = model(batch["vitals"])
    has_stay = ~batch["stay"].isnan()
    has_diagnosis = batch["diagnosis"] >= 0
    wanted = batch["stay"].nan_to_num(0.0)
    squared = ((stay - wanted) ** 2 * has_stay).sum()
    entropy = F.cross_entropy(diagnosis, batch["diagnosis"], ignore_index=-1, reduction="sum")
    return {
        "stay": (squared, has_stay.sum()),
        "diagnosis": (entropy, has_diagnosis.sum()),
    }


def loss(model, batch):
    parts = sums(model, batch)
    stay, n_stay = parts["stay"]
    diagnosis, n_diagnosis = parts["diagnosis"]
    return STAY_WEIGHT * stay / n_stay + DIAGNOSIS_WEIGHT * diagnosis / n_diagnosis


def global_counts(parts):
    """One collective for all heads."""
    counts = torch.stack([valid for _, valid in parts.values()])
    dist.all_reduce(counts)
    return dict(zip(sorted(parts), counts))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    parts = sums(ddp, shard)
    counts = global_counts(parts)
    total = 0.0
    for head, weight in (("stay", STAY_WEIGHT), ("diagnosis", DIAGNOSIS_WEIGHT)):
        total = total + weight * parts[head][0] / counts[head].clamp(min=1)
    (total * dist.get_world_size()).backward()


case = Case(model=TwoHeads, batch=patients, loss=loss, layout="2x2")
