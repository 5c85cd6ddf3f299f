"""Compiled blocks, activation checkpointing, a static graph and ZeRO-1, all by one config."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    lr: float = 0.04
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-2
    steps: int = 2
    compile_backend: str = "aot_eager"
    static_graph: bool = True
    checkpointed: bool = True


CONFIG = Config()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class SharedDepthNet(nn.Module):
    """The same block is applied several times, so that its parameters are used more than once."""

    def __init__(self, dim=6, loops=3):
        super().__init__()
        self.loops = loops
        self.stem = nn.Linear(4, dim)
        self.block = Block(dim)
        self.head = nn.Linear(dim, 3)
        self.run_block = None

    def forward(self, x):
        x = self.stem(x)
        run = self.run_block or self.block
        for _ in range(self.loops):
            x = run(x)
        return self.head(x)


class Runtime:
    def __init__(self, config):
        self.config = config

    def setup(self, model):
        run = torch.compile(model.block.forward, backend=self.config.compile_backend)
        if self.config.checkpointed:
            compiled = run

            def run(x):
                return checkpoint(compiled, x, use_reentrant=False)

        # not a submodule, so the names of the parameters stay as they are
        object.__setattr__(model, "run_block", run)
        return DistributedDataParallel(model, static_graph=self.config.static_graph)

    def setup_optimizer(self, ddp):
        decayed = [p for p in ddp.parameters() if p.ndim > 1]
        plain = [p for p in ddp.parameters() if p.ndim <= 1]
        optimizer = ZeroRedundancyOptimizer(
            decayed,
            optimizer_class=torch.optim.AdamW,
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=0.1,
        )
        optimizer.add_param_group({"params": plain, "weight_decay": 0.0})
        return optimizer


def reference_optimizer(parameters):
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)


def make_batch(generator):
    return {
        "x": torch.randn(8 * CONFIG.steps, 4, generator=generator),
        "y": torch.randint(0, 3, (8 * CONFIG.steps,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def step(model, shard, rank):
    runtime = Runtime(CONFIG)
    ddp = runtime.setup(model)
    optimizer = runtime.setup_optimizer(ddp)
    for x, y in zip(shard["x"].chunk(CONFIG.steps), shard["y"].chunk(CONFIG.steps)):
        optimizer.zero_grad()
        loss(ddp, {"x": x, "y": y}).backward()
        optimizer.step()


case = Case(model=SharedDepthNet, batch=make_batch, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": reference_optimizer, "steps": CONFIG.steps}
