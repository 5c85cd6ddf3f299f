"""Segmentation with DDP and a hook of our own, which divides in two goes to stay in the range of half precision."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SIDE, CLASSES = 6, 3


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 6, kernel_size=3, stride=2, padding=1)
        self.middle = nn.Conv2d(6, 6, kernel_size=3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, kernel_size=2, stride=2)
        self.pixels = nn.Conv2d(4, CLASSES, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.down(images))
        x = x + F.relu(self.middle(x))
        return self.pixels(F.relu(self.up(x)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["masks"])


def scenes(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(8, 2, SIDE, SIDE, generator=generator),
        "masks": torch.randint(CLASSES, (8, SIDE, SIDE), generator=generator),
    }


@dataclass
class ReduceState:
    """Factors for the division before and after the all-reduce."""

    group: dist.ProcessGroup
    before: float
    after: float
    buckets: int = 0

    @classmethod
    def balanced(cls, group: dist.ProcessGroup) -> "ReduceState":
        world = dist.get_world_size(group)
        before = 2.0 ** math.ceil(math.log2(world) / 2)
        return cls(group, before=before, after=float(world))


def divided_all_reduce(
    state: ReduceState, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    state.buckets += 1
    flat = bucket.buffer().div_(state.before)
    future = dist.all_reduce(flat, group=state.group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(state.after))


def wrap(model: nn.Module) -> tuple[DistributedDataParallel, ReduceState]:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    state = ReduceState.balanced(ddp.process_group)
    ddp.register_comm_hook(state, divided_all_reduce)
    return ddp, state


def step(model, shard, rank):
    ddp, state = wrap(model)
    loss(ddp, shard).backward()
    assert state.buckets > 0


case = Case(model=Segmenter, batch=scenes, loss=loss, layout="1x4")
