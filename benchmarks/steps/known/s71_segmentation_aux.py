"""Reference-style training of a segmentation network with an auxiliary classifier."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

CLASSES = 4


class Segmenter(nn.Module):
    """The auxiliary classifier only works during training."""

    def __init__(self):
        super().__init__()
        self.low = nn.Conv1d(3, 6, 3, padding=1)
        self.high = nn.Conv1d(6, 6, 3, padding=1)
        self.classifier = nn.Conv1d(6, CLASSES, 1)
        self.aux_classifier = nn.Conv1d(6, CLASSES, 1)

    def forward(self, x):
        low = torch.tanh(self.low(x))
        out = {"out": self.classifier(torch.tanh(self.high(low)))}
        if self.training:
            out["aux"] = self.aux_classifier(low)
        return out


def criterion(outputs, target):
    losses = {name: F.cross_entropy(value, target) for name, value in outputs.items()}
    if "aux" not in losses:
        return losses["out"]
    return losses["out"] + 0.5 * losses["aux"]


def loss(model, batch):
    return criterion(model(batch["image"]), batch["target"])


def make_batch(generator):
    return {
        "image": torch.randn(12, 3, 8, generator=generator),
        "target": torch.randint(0, CLASSES, (12, 8), generator=generator),
    }


case = Case(model=Segmenter, batch=make_batch, loss=loss, layout="2x1")


def evaluate(model, image, target):
    model.eval()
    with torch.inference_mode():
        hits = model(image)["out"].argmax(1) == target
    return hits.sum().item() / hits.numel()


def train_one_epoch(model, loader, print_freq):
    model.train()
    accuracy = []
    for i, (image, target) in enumerate(loader):
        if i % print_freq == 1:
            accuracy.append(evaluate(model, image, target))
        value = criterion(model(image), target)
        (value / len(loader)).backward()
    return accuracy


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def step(model, shard, rank):
    model.zero_grad()
    loader = list(zip(shard["image"].split(2), shard["target"].split(2), strict=True))
    train_one_epoch(model, loader, print_freq=2)
    average_gradients(model)
