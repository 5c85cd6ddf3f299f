"""A communication hook that adds gradients up: the losses are divided by the weights of all ranks.

Every example has an importance weight, and ranks have very different sums of them. What the ranks
have to exchange for the loss is exchanged once, before the backward pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from ddp_equivalence import Case


class Ledger:
    """The state of the hook: what was sent, for the log."""

    def __init__(self, group=None):
        self.group = group if group is not None else dist.group.WORLD
        self.elements = 0

    def add(self, bucket: dist.GradBucket) -> None:
        self.elements += bucket.buffer().numel()


def sum_hook(ledger: Ledger, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    ledger.add(bucket)
    work = dist.all_reduce(bucket.buffer(), group=ledger.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Survival(nn.Module):
    def __init__(self, features=9):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, 12), nn.CELU(), nn.Linear(12, 6), nn.CELU(), nn.Linear(6, 1)
        )
        self.log_shape = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x):
        return self.net(x).squeeze(-1), self.log_shape.exp()


def losses(model, batch):
    """The negative log likelihood of a Weibull distribution, one of each example."""
    log_scale, shape = model(batch["x"])
    log_time = batch["time"].log() - log_scale
    return (shape * log_time).exp() - batch["observed"] * (shape.log() + shape * log_time)


def loss(model, batch):
    return (batch["importance"] * losses(model, batch)).sum() / batch["importance"].sum()


def patients(generator):
    return {
        "x": torch.randn(20, 9, generator=generator),
        "time": 0.1 + torch.rand(20, generator=generator),
        "observed": torch.randint(2, (20,), generator=generator).double(),
        "importance": torch.linspace(0.1, 3.0, 20).square(),
    }


def step(model, shard, rank):
    ledger = Ledger()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(ledger, sum_hook)
    total = shard["importance"].sum()
    dist.all_reduce(total, group=ledger.group)
    ((shard["importance"] / total) * losses(ddp, shard)).sum().backward()
    assert ledger.elements == parameters_to_vector(model.parameters()).numel()


case = Case(model=Survival, batch=patients, loss=loss, layout="2x2")
