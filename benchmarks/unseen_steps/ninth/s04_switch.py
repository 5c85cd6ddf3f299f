"""A switch layer (top-1 mixture of experts) in a tiny tagger, with the load-balancing loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXPERTS, WIDTH, TAGS = 4, 8, 5
BALANCE = 0.5


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) * 0.3)

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        gate, chosen = probabilities.max(-1)
        mask = F.one_hot(chosen, EXPERTS).to(x.dtype)
        hidden = torch.einsum("btw,ewh->bteh", x, self.up).relu()
        every = torch.einsum("bteh,ehw->btew", hidden, self.down)
        out = (every * mask[..., None]).sum(2) * gate[..., None]
        return x + out, probabilities, chosen


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.switch = Switch()
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, x):
        hidden, probabilities, chosen = self.switch(x)
        return self.tags(hidden), probabilities, chosen


def sentences(generator):
    topics = torch.randn(4, WIDTH, generator=generator) * 2
    which = torch.arange(16) * 4 // 16
    x = torch.randn(16, 6, WIDTH, generator=generator) + topics[which][:, None]
    return {"x": x, "tags": torch.randint(0, TAGS, (16, 6), generator=generator)}


def tokens_per_expert(chosen):
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


def loss(model, batch):
    logits, probabilities, chosen = model(batch["x"])
    load = tokens_per_expert(chosen)
    balance = EXPERTS * (load / load.sum() * probabilities.mean((0, 1))).sum()
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten()) + BALANCE * balance


class Monitor:
    """Keeps how many tokens each expert got in the whole batch, for the dashboards."""

    def __init__(self):
        self.history = []

    def log(self, load):
        share = load.double() / load.sum()
        self.history.append({"load": load.tolist(), "max_over_mean": float(share.max() * EXPERTS)})


def step(model, shard, rank, monitor=None):
    monitor = monitor or Monitor()
    ddp = DistributedDataParallel(model)
    logits, probabilities, chosen = ddp(shard["x"])
    load = tokens_per_expert(chosen)
    fraction = load / load.sum()
    dist.all_reduce(load)
    # The fraction is a constant; only the probabilities, averaged by DDP, have a gradient.
    balance = EXPERTS * (fraction * probabilities.mean((0, 1))).sum()
    tagging = F.cross_entropy(logits.flatten(0, 1), shard["tags"].flatten())
    (tagging + BALANCE * balance).backward()
    monitor.log(load)


case = Case(model=Tagger, batch=sentences, loss=loss, layout="1x4")
