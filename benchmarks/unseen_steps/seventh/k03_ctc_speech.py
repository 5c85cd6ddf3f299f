"""Speech frames with CTC, in micro-batches of unequal size that fit a budget of utterances."""
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, FRAMES, MELS, LABELS = 7, 12, 8, 4


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(MELS, 16, 3, padding=1)
        self.out = nn.Linear(16, VOCAB)

    def forward(self, mels):
        hidden = F.gelu(self.conv(mels.transpose(1, 2))).transpose(1, 2)
        return F.log_softmax(self.out(hidden), dim=-1)


def make_batch(generator):
    n = 12
    return {
        "mels": torch.randn(n, FRAMES, MELS, generator=generator),
        "labels": torch.randint(1, VOCAB, (n, LABELS), generator=generator),
        "frames": torch.randint(9, FRAMES + 1, (n,), generator=generator),
        "lengths": torch.randint(2, LABELS + 1, (n,), generator=generator),
    }


def ctc_per_utterance(model, batch):
    logp = model(batch["mels"]).transpose(0, 1)
    return F.ctc_loss(
        logp, batch["labels"], batch["frames"], batch["lengths"], blank=0, reduction="none"
    )


def loss(model, batch):
    return ctc_per_utterance(model, batch).mean()


def split(batch, sizes):
    start = 0
    for size in sizes:
        yield {key: value[start : start + size] for key, value in batch.items()}
        start += size


class Accumulator:
    def __init__(self, ddp, sizes):
        self.ddp, self.sizes = ddp, sizes

    def context(self, index):
        last = index == len(self.sizes) - 1
        return nullcontext() if last else self.ddp.no_sync()

    def run(self, shard):
        for index, micro in enumerate(split(shard, self.sizes)):
            with self.context(index):
                value = ctc_per_utterance(self.ddp, micro).mean()
                (value / len(self.sizes)).backward()


def step(model, shard, rank):
    ddp = DDP(model)
    budget = [3, 2, 1]  # long utterances come in smaller groups
    Accumulator(ddp, budget).run(shard)


case = Case(model=Acoustic, batch=make_batch, loss=loss)
