"""One-stage detector on a small grid: focal loss on the classes and smooth L1 on the boxes, both divided by the
number of positive anchors in the global batch. DDP averages, so the local sums are scaled by the world size."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CLASSES, ALPHA, GAMMA, BETA = 3, 0.25, 2.0, 0.2


class Detector(nn.Module):
    def __init__(self, width=14):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        )
        self.classes = nn.Conv2d(width, CLASSES, 1)
        self.boxes = nn.Conv2d(width, 4, 1)

    def forward(self, image):
        f = self.backbone(image)
        return self.classes(f).flatten(2).transpose(1, 2), self.boxes(f).flatten(2).transpose(1, 2)


def build_model():
    return Detector()


def make_batch(generator):
    n, anchors = 16, 16
    target = torch.randint(0, 12, (n, anchors), generator=generator)
    target = torch.where(target < CLASSES, target + 1, torch.zeros_like(target))
    target[: n // 2] = 0
    target[:, -1] = -1
    return {
        "image": torch.randn(n, 3, 8, 8, generator=generator),
        "target": target,
        "box": 0.5 * torch.randn(n, anchors, 4, generator=generator),
    }


def focal_sum(logits, target):
    """Sum over the anchors that are not ignored; 0 is background, -1 is ignored."""
    onehot = F.one_hot(target.clamp(min=0), CLASSES + 1)[..., 1:].to(logits.dtype)
    prob = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none")
    p_t = prob * onehot + (1 - prob) * (1 - onehot)
    alpha_t = ALPHA * onehot + (1 - ALPHA) * (1 - onehot)
    per_anchor = (alpha_t * (1 - p_t).pow(GAMMA) * ce).sum(dim=-1)
    return per_anchor[target >= 0].sum()


def box_sum(pred, box, target):
    positive = target > 0
    return F.smooth_l1_loss(pred[positive], box[positive], beta=BETA, reduction="sum")


def loss(model, batch):
    logits, boxes = model(batch["image"])
    positives = (batch["target"] > 0).sum().clamp(min=1)
    return (focal_sum(logits, batch["target"]) + box_sum(boxes, batch["box"], batch["target"])) / positives


class Criterion:
    def __init__(self, world_size):
        self.world_size = world_size

    def normalizer(self, target):
        positives = (target > 0).sum().clamp(min=1)
        dist.all_reduce(positives)
        return positives / self.world_size

    def __call__(self, logits, boxes, shard):
        norm = self.normalizer(shard["target"])
        return {
            "cls": focal_sum(logits, shard["target"]) / norm,
            "box": box_sum(boxes, shard["box"], shard["target"]) / norm,
        }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    criterion = Criterion(rank.world_size)
    logits, boxes = ddp(shard["image"])
    losses = criterion(logits, boxes, shard)
    sum(losses.values()).backward()
