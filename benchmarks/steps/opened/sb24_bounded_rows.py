"""Rows of a weight matrix are kept within a ball after every step, as in max-norm regularisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

from ddp_equivalence import Case, Rank

LR, LARGEST_ROW, STEPS, ROWS = 0.3, 0.5, 2, 16


class Bounded(nn.Linear):
    """A linear layer whose rows have at most a certain norm."""

    @torch.no_grad()
    def project(self) -> None:
        self.weight.copy_(torch.renorm(self.weight, p=2, dim=0, maxnorm=LARGEST_ROW))


class BoundedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Bounded(9, 12)
        self.middle = Bounded(12, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.hidden(x))
        return self.out(torch.sigmoid(self.middle(x)))


def bounded_layers(model: nn.Module) -> list[Bounded]:
    return [module for module in model.modules() if isinstance(module, Bounded)]


def in_one_process(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model.zero_grad()
    loss(model, batch).backward()
    SGD(model.parameters(), lr=LR).step()
    for layer in bounded_layers(model):
        layer.project()


class Loop:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.rank = rank
        self.fsdp = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Bounded}),
            use_orig_params=True,
            device_id=rank.device,
        )
        self.optimizer = SGD(self.fsdp.parameters(), lr=LR)

    def project(self) -> None:
        # Whole rows are needed, and a rank holds parts of them.
        with FSDP.summon_full_params(self.fsdp, writeback=False):
            for layer in bounded_layers(self.fsdp):
                layer.project()

    def train(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.fsdp, batch).backward()
        self.optimizer.step()
        self.project()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(STEPS * ROWS, 9, generator=generator)
    return {"x": x, "y": x[:, :3].sign() * x[:, 3:6]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    loop = Loop(model, rank)
    each = ROWS // rank.world_size
    for number in range(STEPS):
        begin = number * ROWS + rank.rank * each
        loop.train({name: rows[begin : begin + each] for name, rows in batch.items()})


case = Case(model=BoundedNet, batch=make_batch, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "reference": in_one_process, "steps": STEPS}
