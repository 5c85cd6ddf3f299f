"""Post-local SGD for a ranking model: gradients are reduced inside a node, weights are averaged over all ranks.

The average is taken after every step, and momentum is linear in the gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FEATURES, STEPS = 9, 3


class Ranker(nn.Module):
    """A wide part and a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, 1, bias=False)
        self.deep = nn.Sequential(nn.Linear(FEATURES, 12), nn.SiLU(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) + self.deep(x)).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    better, worse = model(batch["better"]), model(batch["worse"])
    return F.softplus(worse - better).mean()


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "better": torch.randn(8 * STEPS, FEATURES, generator=generator) + 0.1,
        "worse": torch.randn(8 * STEPS, FEATURES, generator=generator),
    }


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.8, weight_decay=1e-3)


def node_group(node: int, nodes: int, per_node: int) -> dist.ProcessGroup:
    groups = [
        dist.new_group(list(range(n * per_node, (n + 1) * per_node))) for n in range(nodes)
    ]
    return groups[node]


class PostLocal:
    def __init__(self, model: nn.Module, subgroup: dist.ProcessGroup) -> None:
        self.ddp = DistributedDataParallel(model)
        state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=0)
        self.ddp.register_comm_hook(state, post_localSGD_hook)
        self.optimizer = PostLocalSGDOptimizer(
            optim=make_optimizer(self.ddp.parameters()),
            averager=PeriodicModelAverager(period=1, warmup_steps=0),
        )

    def __call__(self, better: Tensor, worse: Tensor) -> None:
        self.optimizer.zero_grad()
        both = self.ddp(torch.cat([better, worse]))
        good, bad = both.split(len(better))
        F.softplus(bad - good).mean().backward()
        self.optimizer.step()


def step(model, shard, rank):
    train = PostLocal(model, node_group(rank.node, rank.nodes, rank.local_world_size))
    for better, worse in zip(shard["better"].chunk(STEPS), shard["worse"].chunk(STEPS)):
        train(better, worse)


case = Case(model=Ranker, batch=pairs, loss=loss, layout="2x2")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
