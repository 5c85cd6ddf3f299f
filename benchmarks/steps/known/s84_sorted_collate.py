"""Utterances of several lengths for a recurrent network; the data set weights its utterances."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence

from ddp_equivalence import Case

CLASSES = 4


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 6, batch_first=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.rnn(packed)
        return self.out(state[-1])


def weighted_sum(logits, batch):
    losses = F.cross_entropy(logits, batch["label"], reduction="none")
    return (losses * batch["weight"]).sum()


def loss(model, batch):
    logits = model(batch["frames"], batch["lengths"])
    return weighted_sum(logits, batch) / batch["weight"].sum()


def make_batch(generator):
    return {
        "frames": torch.randn(10, 6, 3, generator=generator),
        "lengths": torch.randint(2, 7, (10,), generator=generator),
        "label": torch.randint(0, CLASSES, (10,), generator=generator),
        "weight": 0.2 + torch.rand(10, generator=generator),
    }


case = Case(model=Recognizer, batch=make_batch, loss=loss, layout="1x2")


class SortedCollate:
    """Longest utterance first, and no more frames than that one has."""

    def __call__(self, items):
        items_by_length = sorted(items, key=lambda item: item["lengths"], reverse=True)
        lengths = torch.stack([item["lengths"] for item in items_by_length])
        frames = torch.stack([item["frames"] for item in items_by_length])
        return {
            "frames": frames[:, : int(lengths[0])],
            "lengths": lengths,
            "label": torch.stack([item["label"] for item in items_by_length]),
            "weight": torch.stack([item["weight"] for item in items]),
        }


def as_items(shard):
    return [{name: shard[name][i] for name in shard} for i in range(len(shard["label"]))]


def step(model, shard, rank):
    model.zero_grad()
    wrapped = DDP(model)
    batch = SortedCollate()(as_items(shard))
    total_weight = batch["weight"].sum()
    dist.all_reduce(total_weight)
    logits = wrapped(batch["frames"], batch["lengths"])
    (weighted_sum(logits, batch) * rank.world_size / total_weight).backward()
