"""Set prediction of boxes: class and L1 losses, both divided by the number of true boxes."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

QUERIES, CLASSES = 5, 4


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.classes = nn.Linear(4 * 9, QUERIES * CLASSES)
        self.boxes = nn.Linear(4 * 9, QUERIES * 4)

    def forward(self, images):
        hidden = self.backbone(images)
        return {
            "logits": self.classes(hidden).unflatten(-1, (QUERIES, CLASSES)),
            "boxes": self.boxes(hidden).unflatten(-1, (QUERIES, 4)).sigmoid(),
        }


def make_batch(generator):
    n = 8
    present = torch.rand(n, QUERIES, generator=generator) < 0.5
    present[:, 0] = True
    return {
        "images": torch.randn(n, 1, 8, 8, generator=generator),
        "boxes": torch.rand(n, QUERIES, 4, generator=generator),
        "labels": torch.randint(0, CLASSES, (n, QUERIES), generator=generator),
        "present": present.long(),
    }


class SetCriterion:
    weights = {"ce": 1.0, "l1": 5.0}

    def __init__(self, count):
        self.count = count  # target -> number of boxes to divide by

    def __call__(self, outputs, target):
        present = target["present"].bool()
        number = self.count(target)
        terms = {
            "ce": F.cross_entropy(
                outputs["logits"][present], target["labels"][present], reduction="sum"
            ),
            "l1": (outputs["boxes"] - target["boxes"]).abs()[present].sum(),
        }
        return sum(self.weights[name] * value / number for name, value in terms.items())


def count_here(target):
    return target["present"].sum().clamp(min=1)


def count_everywhere(target):
    number = target["present"].sum()
    dist.all_reduce(number)
    return number.clamp(min=1)


def loss(model, batch):
    return SetCriterion(count_here)(model(batch["images"]), batch)


def step(model, shard, rank):
    ddp = DDP(model)
    criterion = SetCriterion(count_everywhere)
    criterion(ddp(shard["images"]), shard).backward()


case = Case(model=Detector, batch=make_batch, loss=loss, layout="2x2")
