"""A mixture of experts with a load-balancing loss over the tokens of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FEATURES, EXPERTS, CLASSES, EXAMPLES = 6, 4, 3, 24
BALANCE = 0.5
RANKS_PER_NODE = 2


@dataclass
class Groups:
    node: dist.ProcessGroup
    data: dist.ProcessGroup

    @classmethod
    def build(cls) -> Groups:
        world = dist.get_world_size()
        mine = None
        for first in range(0, world, RANKS_PER_NODE):
            members = list(range(first, first + RANKS_PER_NODE))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        return cls(node=mine, data=dist.new_group(list(range(world))))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS)
        self.stats_group: dist.ProcessGroup | None = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probabilities = self.gate(tokens).softmax(-1)
        weight, choice = probabilities.max(-1)
        return weight, choice, self.balance(probabilities, choice)

    def balance(self, probabilities: Tensor, choice: Tensor) -> Tensor:
        routed = torch.bincount(choice, minlength=EXPERTS).to(probabilities.dtype)
        if self.stats_group is not None:
            dist.all_reduce(routed, group=self.stats_group)
        fraction = routed / routed.sum()
        return EXPERTS * (fraction * probabilities.mean(0)).sum()


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(EXPERTS))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, choice, balance = self.router(tokens)
        everything = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        chosen = everything[torch.arange(len(tokens)), choice]
        return self.head(tokens + weight.unsqueeze(-1) * torch.tanh(chosen)), balance


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, balance = model(batch["tokens"])
    return F.cross_entropy(logits, batch["labels"]) + BALANCE * balance


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": 2 * torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class Trainer:
    def __init__(self, model: MixtureOfExperts, groups: Groups) -> None:
        model.router.stats_group = groups.node
        self.ddp = DistributedDataParallel(model, process_group=groups.data)

    def run(self, batch: dict[str, Tensor]) -> None:
        self.ddp.zero_grad()
        loss(self.ddp, batch).backward()


case = Case(model=MixtureOfExperts, batch=make_batch, loss=loss, layout="2x2")


def step(model, shard, rank):
    Trainer(model, Groups.build()).run(shard)
