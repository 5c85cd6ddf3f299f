"""Keyword spotting on hosts of different size: reduce within a host, then between the hosts' leaders."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

MFCC, FRAMES, KEYWORDS = 6, 10, 5


class Spotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(MFCC, 9, batch_first=True)
        self.attention = nn.Linear(9, 1)
        self.keyword = nn.Linear(9, KEYWORDS)

    def forward(self, mfcc: Tensor) -> Tensor:
        hidden, _ = self.rnn(mfcc)
        weight = self.attention(hidden).softmax(dim=1)
        return self.keyword((weight * hidden).sum(dim=1))


def clips(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "mfcc": torch.randn(12, FRAMES, MFCC, generator=generator),
        "keyword": torch.randint(KEYWORDS, (12,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["mfcc"]), batch["keyword"], label_smoothing=0.1)


class HostTree:
    """Two levels: all ranks of a host, and the first rank of every host."""

    def __init__(self, host: int) -> None:
        hosts = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host)
        members = {h: [r for r, of in enumerate(hosts) if of == h] for h in sorted(set(hosts))}
        groups = {h: dist.new_group(ranks) for h, ranks in members.items()}
        leaders = [ranks[0] for ranks in members.values()]
        self.within, self.leader = groups[host], members[host][0]
        self.between = dist.new_group(leaders)
        self.hosts = len(leaders)
        self.leading = dist.get_rank() == self.leader

    def average_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.within)
        tensor /= dist.get_world_size(self.within)
        if self.leading:
            dist.all_reduce(tensor, group=self.between)
            tensor /= self.hosts
        dist.broadcast(tensor, src=self.leader, group=self.within)


def step(model, shard, rank):
    tree = HostTree(rank.node)
    loss(model, shard).backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.nn.utils.parameters_to_vector(grads)
    tree.average_(flat)
    torch.nn.utils.vector_to_parameters(flat, grads)


case = Case(model=Spotter, batch=clips, loss=loss, layout="1+3")
