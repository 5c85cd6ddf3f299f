"""Set prediction of boxes: box losses are divided by the average number of boxes on a rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

QUERIES = 5
CLASSES = 3
BOXES = [2, 1, 0, 3, 2, 4, 1, 1, 3, 0, 2, 4]
WEIGHTS = {"classes": 1.0, "boxes": 5.0, "sizes": 2.0}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(QUERIES, 16))
        self.classifier = nn.Linear(16, CLASSES + 1)
        self.boxes = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x)[:, None] + self.queries)
        return {"logits": self.classifier(hidden), "boxes": self.boxes(hidden).sigmoid()}


class Criterion:
    """Query number i is matched with box number i of its image; the others see no object."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size

    def number_of_boxes(self, matched: Tensor) -> Tensor:
        count = matched.sum()
        if self.world_size > 1:
            dist.all_reduce(count)
        return torch.clamp(count // self.world_size, min=1)

    def losses(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        matched = batch["classes"] < CLASSES
        boxes = self.number_of_boxes(matched)
        found, wanted = outputs["boxes"][matched], batch["boxes"][matched]
        return {
            "classes": F.cross_entropy(outputs["logits"].flatten(0, 1), batch["classes"].flatten()),
            "boxes": F.l1_loss(found, wanted, reduction="sum") / boxes,
            "sizes": (found[:, 2:].log() - wanted[:, 2:].log()).square().sum() / boxes,
        }

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        losses = self.losses(outputs, batch)
        return torch.stack([WEIGHTS[name] * value for name, value in losses.items()]).sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Criterion()(model(batch["image"]), batch)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    count = len(BOXES)
    classes = torch.randint(0, CLASSES, (count, QUERIES), generator=generator)
    is_box = torch.arange(QUERIES) < torch.tensor(BOXES)[:, None]
    return {
        "image": torch.randn(count, 10, generator=generator),
        "classes": classes.masked_fill(~is_box, CLASSES),
        "boxes": 0.1 + 0.8 * torch.rand(count, QUERIES, 4, generator=generator),
    }


case = Case(model=Detector, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    criterion = Criterion(rank.world_size)
    ddp = DistributedDataParallel(model)
    criterion(ddp(shard["image"]), shard).backward()
