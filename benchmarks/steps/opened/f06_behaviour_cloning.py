# Behaviour cloning of a 7-DoF arm from proprioception; chunks of future actions.
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    state: int = 14
    action: int = 7
    horizon: int = 4
    hidden: int = 24
    demos: int = 32
    micro_batches: int = 2


cfg = Config()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(cfg.state, cfg.hidden),
            nn.LayerNorm(cfg.hidden),
            nn.GELU(),
            nn.Linear(cfg.hidden, cfg.hidden),
            nn.GELU(),
        )
        self.chunk = nn.Linear(cfg.hidden, cfg.action * cfg.horizon)
        self.gripper = nn.Linear(cfg.hidden, cfg.horizon)

    def forward(self, state):
        h = self.body(state)
        return self.chunk(h).unflatten(-1, (cfg.horizon, cfg.action)), self.gripper(h)


def bc_loss(policy, demo):
    arm, gripper = policy(demo["state"])
    l1 = (arm - demo["arm"]).abs().mean()
    bce = nn.functional.binary_cross_entropy_with_logits(gripper, demo["gripper"])
    return l1 + 0.1 * bce


def demos(generator):
    n = cfg.demos
    return {
        "state": torch.randn(n, cfg.state, generator=generator),
        "arm": torch.randn(n, cfg.horizon, cfg.action, generator=generator),
        "gripper": torch.rand(n, cfg.horizon, generator=generator).round(),
    }


case = Case(model=Policy, batch=demos, loss=bc_loss, layout="2x2")


def split(demo, parts):
    chunks = {name: value.chunk(parts) for name, value in demo.items()}
    for i in range(parts):
        yield {name: values[i] for name, values in chunks.items()}


def step(model, shard, rank):
    ddp = DDP(model)
    losses = []
    # one reduction for all micro-batches
    with ddp.no_sync():
        for micro in split(shard, cfg.micro_batches):
            losses.append(bc_loss(ddp, micro))
    torch.stack(losses).mean().backward()
