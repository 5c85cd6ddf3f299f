"""Two augmented views of every image go through the encoder, one after the other.

Gradients are exchanged only once, after the losses of both views have been added up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.ELU(),
            nn.AvgPool2d(2),
            nn.Conv2d(5, 7, 3, padding=1),
            nn.ELU(),
        )
        self.classify = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).mean((2, 3)))


def flipped(images: Tensor) -> Tensor:
    return images.flip(-1)


def darkened(images: Tensor) -> Tensor:
    return 0.7 * images - 0.1


VIEWS = (flipped, darkened)


def view_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = [view_loss(model, view(batch["images"]), batch["labels"]) for view in VIEWS]
    return torch.stack(losses).mean()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "images": torch.rand(12, 1, 8, 8, generator=generator),
        "labels": torch.randint(3, (12,), generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x3")


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model, broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05)
        self.history: list[float] = []

    def losses(self, batch: Batch) -> list[Tensor]:
        losses = []
        for view in VIEWS:
            with self.ddp.no_sync():
                losses.append(view_loss(self.ddp, view(batch["images"]), batch["labels"]))
        return losses

    def train_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        total = torch.stack(self.losses(batch)).mean()
        total.backward()
        self.optimizer.step()
        self.history.append(total.item())


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    trainer = Trainer(model)
    trainer.train_on(shard)
