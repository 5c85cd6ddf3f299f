"""Trainer with a post-local SGD strategy: ordinary data parallelism while warming up, host-local averaging afterwards."""
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TRAINER = {
    "strategy": "post_local_sgd",
    "max_steps": 20_000,
    "period": 8,
    "warmup_steps": 500,
    "bucket_cap_mb": 1,
}

FIELD_SIZES = (11, 7, 13, 5)


class FactorizationMachine(nn.Module):
    """Second-order FM with a small deep part on top of the pooled fields."""

    def __init__(self, sizes=FIELD_SIZES, dim=6):
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(n, 1) for n in sizes)
        self.factors = nn.ModuleList(nn.Embedding(n, dim) for n in sizes)
        self.deep = nn.Sequential(nn.Linear(len(sizes) * dim, 10), nn.PReLU(), nn.Linear(10, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, fields_):
        first = sum(table(fields_[:, i]) for i, table in enumerate(self.linear))
        v = torch.stack([table(fields_[:, i]) for i, table in enumerate(self.factors)], 1)
        second = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        return (self.bias + first + second + self.deep(v.flatten(1))).squeeze(1)


def impressions(generator):
    columns = [torch.randint(0, n, (16,), generator=generator) for n in FIELD_SIZES]
    clicked = torch.randint(0, 2, (16,), generator=generator)
    return {"fields": torch.stack(columns, 1), "clicked": clicked}


def click_loss(model, batch):
    logits = model(batch["fields"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"].to(logits))


@dataclass
class LocalSGDConfig:
    period: int = 4
    start_iter: int = 0
    bucket_cap_mb: int = 25

    @classmethod
    def from_trainer(cls, args):
        """Take from the trainer's arguments those that concern this strategy."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in args.items() if key in known})


class LocalSGDStrategy:
    def __init__(self, config, local_world_size):
        self.config = config
        self.subgroup, _ = dist.new_subgroups(local_world_size)

    def wrap(self, model):
        ddp = DDP(model, bucket_cap_mb=self.config.bucket_cap_mb)
        self.state = PostLocalSGDState(
            process_group=None,
            subgroup=self.subgroup,
            start_localSGD_iter=self.config.start_iter,
        )
        ddp.register_comm_hook(self.state, post_localSGD_hook)
        return ddp


class Trainer:
    def __init__(self, args, local_world_size):
        self.strategy = LocalSGDStrategy(LocalSGDConfig.from_trainer(args), local_world_size)

    def first_step(self, model, batch):
        self.model = self.strategy.wrap(model)
        click_loss(self.model, batch).backward()


def step(model, shard, rank):
    trainer = Trainer(TRAINER, local_world_size=2)
    trainer.first_step(model, shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=FactorizationMachine, batch=impressions, loss=click_loss, layout="2x2")
