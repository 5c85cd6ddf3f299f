"""A mixture of experts whose router is kept balanced over the tokens of the whole batch."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXPERTS, WIDTH, LENGTH, VOCAB = 4, 8, 6, 20
BALANCE = 0.5


class Routed(NamedTuple):
    logits: Tensor
    load: Tensor  # the share of the tokens that each expert received
    probability: Tensor  # mean probability that the router gives to each expert


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.4 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.tokens(tokens).flatten(0, 1)
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.max(dim=-1)
        hidden = torch.einsum("td,tdh->th", x, self.up[chosen]).relu()
        x = x + weight.unsqueeze(1) * torch.einsum("th,thd->td", hidden, self.down[chosen])
        load = F.one_hot(chosen, EXPERTS).to(x.dtype).mean(dim=0)
        return Routed(self.head(x), load, gates.mean(dim=0))


def text(generator):
    # documents of one language come together, and use their own words
    low = torch.randint(0, VOCAB // 2, (6, LENGTH + 1), generator=generator)
    high = torch.randint(VOCAB // 2, VOCAB, (6, LENGTH + 1), generator=generator)
    return {"text": torch.cat([low, high])}


def next_token(routed, batch):
    return F.cross_entropy(routed.logits, batch["text"][:, 1:].flatten())


def loss(model, batch):
    routed = model(batch["text"][:, :-1])
    balance = EXPERTS * (routed.load * routed.probability).sum()
    return next_token(routed, batch) + BALANCE * balance


class Monitor:
    """Keeps what goes to the dashboard."""

    def __init__(self):
        self.seen = {}

    def __call__(self, **values):
        self.seen.update({name: value.tolist() for name, value in values.items()})


def step(model, shard, rank):
    monitor = Monitor()
    ddp = DistributedDataParallel(model)
    routed = ddp(shard["text"][:, :-1])
    load = routed.load / rank.world_size
    dist.all_reduce(load)
    monitor(load=load, most=load.max())
    uneven = EXPERTS * (routed.load * routed.probability).sum()
    (next_token(routed, shard) + BALANCE * uneven).backward()


case = Case(model=Mixture, batch=text, loss=loss, layout="1x2")
