"""DDP with a static graph, checkpointed blocks, and AdamW whose states are spread over the ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

STEPS, MAX_NORM = 3, 0.5
DECAY = 0.1


class Shared(nn.Module):
    """One block that is applied several times, as in ALBERT."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Recurrent(nn.Module):
    def __init__(self, dim=10, depth=3):
        super().__init__()
        self.depth = depth
        self.inp = nn.Linear(4, dim)
        self.block = Shared(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for _ in range(self.depth):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.out(x).squeeze(-1)


def batch(generator):
    x = torch.randn(8 * STEPS, 4, generator=generator)
    return {"x": x, "y": 2 * x.prod(1) + x.sum(1)}


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["x"]), batch["y"])


def groups(parameters):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(parameters):
    return torch.optim.AdamW(groups(parameters), lr=0.01, eps=1e-3)


def make_sharded_optimizer(parameters):
    return ZeroRedundancyOptimizer(
        groups(parameters), torch.optim.AdamW, lr=0.01, eps=1e-3, parameters_as_bucket_view=True
    )


class Loop:
    def __init__(self, model, rank):
        # a block that backward enters several times needs a static graph
        self.ddp = DDP(model, static_graph=True)
        self.optimizer = make_sharded_optimizer(self.ddp.parameters())

    def __call__(self, data):
        self.optimizer.zero_grad()
        loss(self.ddp, data).backward()
        # every rank has all gradients, whatever part of the states it keeps
        nn.utils.clip_grad_norm_(self.ddp.parameters(), MAX_NORM)
        self.optimizer.step()


step = Loop
case = Case(model=Recurrent, batch=batch, loss=loss, layout="1x2")
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "clip": MAX_NORM,
    "steps": STEPS,
}
