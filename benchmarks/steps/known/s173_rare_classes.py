"""Segments tiles of aerial pictures. Rare classes weigh more, by their frequency in the batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = 5
GROUND = (0.55, 0.3, 0.1, 0.04, 0.01)

Batch = dict[str, Tensor]


class TileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, CLASSES, 2, stride=2)

    def forward(self, tiles: Tensor) -> Tensor:
        x = F.relu(self.down(tiles))
        return self.up(x + F.relu(self.mid(x)))


def sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def class_weights(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse frequency of each class; one pixel is added, since a class may be missing."""
    counts = sum_over_ranks(torch.bincount(labels.flatten(), minlength=CLASSES) + 1)
    return counts.sum() / (CLASSES * counts.to(dtype))


def weighted_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over this rank's pixels, divided by the weight of all pixels of the big batch."""
    weight = class_weights(labels, logits.dtype)
    summed = F.cross_entropy(logits, labels, weight=weight, reduction="sum")
    return summed / sum_over_ranks(weight[labels].sum())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return weighted_error(model(batch["tiles"]), batch["ground"])


def make_batch(generator: torch.Generator) -> Batch:
    share = torch.tensor(GROUND)
    ground = torch.multinomial(share, 8 * 36, replacement=True, generator=generator)
    return {
        "tiles": torch.randn(8, 3, 6, 6, generator=generator),
        "ground": ground.view(8, 6, 6),
    }


case = Case(model=TileNet, batch=make_batch, loss=loss, layout="1x4")


class TileTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = DistributedDataParallel(model, broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.world_size = rank.world_size

    def train_step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        value = weighted_error(self.model(batch["tiles"]), batch["ground"])
        (self.world_size * value).backward()
        self.optimizer.step()
        return value.detach()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    TileTrainer(model, rank).train_step(shard)
