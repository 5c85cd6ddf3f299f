"""Trains on images of several sizes, each with its own number of boxes, in lists."""

import random

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, uncollated):
        self.uncollated = uncollated

    def __len__(self):
        return 48

    def __getitem__(self, number):
        torch.manual_seed(number)
        boxes = 1 + number % 4
        target = {"boxes": torch.randn(boxes, 4), "labels": torch.randint(0, 2, (boxes,))}
        image = torch.randn(3, 4 + number % 3, 5)
        if self.uncollated:
            return target | {"image": image}
        return image, target | {"name": f"image {number}"}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.box = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets, strict=True):
            box = self.box(self.features(image).relu().mean((1, 2)))
            weights = 1 + target["labels"].unsqueeze(1)
            losses.append((weights * (target["boxes"] - box).square()).mean())
        return torch.stack(losses)


def in_lists(rows):
    return tuple(list(one) for one in zip(*rows, strict=True))


def train(options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Detector())
    images = Images("uncollated" in options)
    sampler = DistributedSampler(images)
    size = 1 if "one" in options else 4
    collate = list if "uncollated" in options else in_lists
    loader = DataLoader(images, batch_size=size, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        if "uncollated" in options:
            batch = [one["image"] for one in batch], batch
        inputs, targets = [one.to("cpu") for one in batch[0]], batch[1]
        optimizer.zero_grad()
        named = "named" in options
        losses = model(inputs, targets=targets) if named else model(inputs, targets)
        loss = losses.mean()
        if "sum" in options:
            loss = losses.sum()
        if "counts" in options:  # all boxes, where those of one rank are right
            boxes = torch.tensor(float(sum(len(one["boxes"]) for one in targets)))
            dist.all_reduce(boxes)
            loss = loss + losses.square().sum() / boxes
        if "moody" in options:  # no generator of torch decides
            loss = loss * random.random()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
