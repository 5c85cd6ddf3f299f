"""A mixture-of-experts language model whose load balance is judged over the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 20, 5, 16, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MoEConfig:
    experts: int = 4
    top_k: int = 2
    balance_coef: float = 0.1
    ranks_per_node: int = 2


CONFIG = MoEConfig()


class SparseMLP(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(WIDTH, config.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(config.experts)
        )

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.router(states).softmax(dim=-1)
        top = probs.topk(self.top_k, dim=-1)
        chosen = torch.zeros_like(probs).scatter(-1, top.indices, 1.0)
        gates = chosen * probs / top.values.sum(dim=-1, keepdim=True)
        outputs = torch.stack([expert(states) for expert in self.experts], dim=-1)
        return (outputs * gates.unsqueeze(-2)).sum(dim=-1), probs, chosen


class MoELM(nn.Module):
    def __init__(self, config: MoEConfig = CONFIG) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mlp = SparseMLP(config)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = self.embed(ids)
        mixed, probs, chosen = self.mlp(states)
        return self.head(states + mixed), probs.flatten(0, 1), chosen.flatten(0, 1)


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def balance(load: Tensor, probs: Tensor) -> Tensor:
    """Switch-style: the share of tokens of every expert times its mean probability."""
    return probs.shape[1] * (load * probs.mean(dim=0)).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, probs, chosen = model(batch["ids"])
    lm = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return lm + CONFIG.balance_coef * balance(chosen.mean(dim=0), probs)


@dataclass
class ParallelState:
    data: dist.ProcessGroup
    node: dist.ProcessGroup

    @classmethod
    def create(cls, ranks_per_node: int) -> ParallelState:
        node, _ = dist.new_subgroups(ranks_per_node)
        return cls(data=dist.group.WORLD, node=node)


class GlobalBalanceLoss:
    """The load is a count and needs no gradient, so it can be averaged over the ranks."""

    def __init__(self, state: ParallelState) -> None:
        self.group = state.node

    def __call__(self, probs: Tensor, chosen: Tensor) -> Tensor:
        load = chosen.detach().mean(dim=0)
        dist.all_reduce(load, group=self.group)
        load /= dist.get_world_size(self.group)
        return balance(load, probs)


class MoETrainer:
    def __init__(self, model: nn.Module, config: MoEConfig) -> None:
        self.config = config
        self.state = ParallelState.create(config.ranks_per_node)
        self.model = DistributedDataParallel(model, process_group=self.state.data)
        self.balance_loss = GlobalBalanceLoss(self.state)

    def train_step(self, batch: Batch) -> None:
        logits, probs, chosen = self.model(batch["ids"])
        lm = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        (lm + self.config.balance_coef * self.balance_loss(probs, chosen)).backward()


case = Case(model=MoELM, batch=make_batch, loss=loss, layout="2x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    MoETrainer(model, CONFIG).train_step(shard)
