"""A small acoustic model with CTC. Utterances are grouped by length, so ranks hold different numbers of labels."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PHONES = 9  # 0 is the blank
MEL = 5
FRAMES = 16


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.subsample = nn.Conv1d(MEL, 12, kernel_size=3, padding=1)
        self.mix = nn.Conv1d(12, 12, kernel_size=5, padding=2, groups=3)
        self.out = nn.Linear(12, PHONES)

    def forward(self, mel):
        x = torch.tanh(self.subsample(mel.transpose(1, 2)))
        x = x + torch.tanh(self.mix(x))
        return self.out(x.transpose(1, 2)).log_softmax(-1)


def utterances(generator):
    n = 8
    labels = torch.tensor([1, 2, 2, 3, 4, 5, 5, 6])
    frames = torch.tensor([8, 9, 9, 11, 13, 14, 15, 16])
    return {
        "mel": torch.randn(n, FRAMES, MEL, generator=generator),
        "frames": frames,
        "phones": torch.randint(1, PHONES, (n, 6), generator=generator),
        "labels": labels,
    }


def ctc(log_probs, batch):
    """Negative log likelihood of all utterances, summed."""
    return F.ctc_loss(
        log_probs.transpose(0, 1),
        batch["phones"],
        batch["frames"],
        batch["labels"],
        reduction="sum",
    )


def loss(model, batch):
    return ctc(model(batch["mel"]), batch) / batch["labels"].sum()


class LabelCounter:
    """How many labels a rank's share of the batch has, the same number on all ranks."""

    def __init__(self, device):
        self.device = device

    def __call__(self, batch):
        labels = batch["labels"].sum().to(self.device, torch.float64)
        dist.all_reduce(labels, op=dist.ReduceOp.MAX)
        return labels


def step(model, shard, rank):
    per_rank = LabelCounter(rank.device)
    ddp = DDP(model, broadcast_buffers=False)
    value = ctc(ddp(shard["mel"]), shard) / per_rank(shard)
    value.backward()


case = Case(model=Acoustic, batch=utterances, loss=loss)
