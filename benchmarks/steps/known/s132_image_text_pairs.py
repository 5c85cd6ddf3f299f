"""Image and text towers are trained on pairs; the negatives come from all ranks.

Every rank computes only its own rows of the matrix of similarities, which saves memory.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Pairs = dict[str, Tensor]


def tower(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class TwoTowers(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.image = tower(12, width)
        self.text = tower(7, width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(4.0)))

    def forward(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(pairs["image"].flatten(1)), dim=-1)
        text = F.normalize(self.text(pairs["text"]), dim=-1)
        return image, text, self.log_scale.exp()


def loss(model: nn.Module, pairs: Pairs) -> Tensor:
    image, text, scale = model(pairs)
    logits = scale * image @ text.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def make_batch(generator: torch.Generator) -> Pairs:
    return {
        "image": torch.randn(12, 3, 2, 2, generator=generator),
        "text": torch.randn(12, 7, generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="2x2")


class LocalRowsLoss(nn.Module):
    """The rows of this rank's images and texts, against the texts and images of all ranks."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self.labels: dict[int, Tensor] = {}

    def labels_of(self, rows: int) -> Tensor:
        if rows not in self.labels:
            self.labels[rows] = torch.arange(rows) + rows * self.rank.local_rank
        return self.labels[rows]

    def forward(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        everybody_image = torch.cat(all_gather(image))
        everybody_text = torch.cat(all_gather(text))
        labels = self.labels_of(len(image)).to(image.device)
        by_image = F.cross_entropy(scale * image @ everybody_text.T, labels)
        by_text = F.cross_entropy(scale * text @ everybody_image.T, labels)
        return (by_image + by_text) / 2


def step(model: nn.Module, shard: Pairs, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = LocalRowsLoss(rank)
    ddp.zero_grad()
    image, text, scale = ddp(shard)
    criterion(image, text, scale).backward()
