"""A small CTC recogniser. The last rank gets the short rest of the epoch, so ranks differ in size."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FRAMES, MELS, LETTERS, LONGEST = 20, 6, 9, 5


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(MELS, 12, kernel_size=3, padding=1)
        self.rnn = nn.GRU(12, 10, batch_first=True, bidirectional=True)
        self.letters = nn.Linear(20, LETTERS)

    def forward(self, mels):
        hidden = torch.relu(self.front(mels.transpose(1, 2))).transpose(1, 2)
        hidden, _ = self.rnn(hidden)
        return self.letters(hidden).log_softmax(-1)


def utterances(generator):
    n = 8
    lengths = torch.randint(2, LONGEST + 1, (n,), generator=generator)
    return {
        "mels": torch.randn(n, FRAMES, MELS, generator=generator),
        "frames": torch.randint(14, FRAMES + 1, (n,), generator=generator),
        "letters": torch.randint(1, LETTERS, (n, LONGEST), generator=generator),
        "lengths": lengths,
    }


def ctc(model, batch):
    """Mean over utterances of the CTC loss per letter."""
    return F.ctc_loss(
        model(batch["mels"]).transpose(0, 1),
        batch["letters"],
        batch["frames"],
        batch["lengths"],
        reduction="mean",
    )


def loss(model, batch):
    return ctc(model, batch)


class UnevenRanks:
    """How much this rank's mean must count when DDP averages over ranks of unequal size."""

    def __init__(self, rank):
        self.world_size = rank.world_size

    def weight(self, utterances):
        mine = total = torch.tensor(float(utterances))
        dist.all_reduce(total)
        return self.world_size * mine / total


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    weight = UnevenRanks(rank).weight(len(shard["mels"]))
    value = ctc(ddp, shard)
    (weight * value).backward()


case = Case(model=Recogniser, batch=utterances, loss=loss, layout="1x2", shards="6+2")
