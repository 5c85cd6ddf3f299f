"""Defects on steel plates; a communication hook divides a part before the sum, against overflow."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS, PLATES, DEFECTS = 2, 16, 5


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2),
        nn.Mish(),
        nn.Flatten(),
        nn.Linear(27, 12),
        nn.Mish(),
        nn.Linear(12, DEFECTS),
    )


def plates(generator: torch.Generator) -> dict[str, Tensor]:
    rows = PLATES * STEPS
    return {
        "scan": torch.randn(rows, 1, 7, 7, generator=generator),
        "defects": torch.randint(0, 2, (rows, DEFECTS), generator=generator).double(),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.multilabel_soft_margin_loss(model(batch["scan"]), batch["defects"])


class PredividedAverage:
    """Use: ``ddp.register_comm_hook(None, PredividedAverage(world).hook)``."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.before = self.factor(world)
        self.after = world

    @staticmethod
    def factor(world: int) -> float:
        """The power of two that is nearest to the root of the world size."""
        return 2.0 ** round(math.log2(world) / 2)

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(self.before)
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(self.finish)

    def finish(self, future: torch.futures.Future) -> Tensor:
        return future.value()[0].div_(self.after)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.4, momentum=0.9, weight_decay=1e-3)


def step(model: nn.Module, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, PredividedAverage(rank.world_size).hook)
    optimizer = make_optimizer(ddp.parameters())

    def train(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        loss(ddp, batch).backward()
        optimizer.step()

    return train


case = Case(model=build_model, batch=plates, loss=loss, layout="1x4")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
