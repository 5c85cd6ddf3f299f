"""Image-text pretraining: every rank scores its own pairs against the captions and images of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

WORDS, LENGTH, WIDTH = 40, 6, 10


class ImageText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)
        self.project_image = nn.Linear(8, WIDTH)
        self.words = nn.Embedding(WORDS, 12)
        self.project_text = nn.Linear(12, WIDTH)

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        image = self.project_image(self.patches(pixels).relu().mean(dim=(2, 3)))
        text = self.project_text(self.words(tokens).mean(dim=1))
        return F.normalize(image, dim=-1), F.normalize(text, dim=-1)


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixels": torch.rand(12, 3, 8, 8, generator=generator),
        "tokens": torch.randint(WORDS, (12, LENGTH), generator=generator),
    }


def symmetric(image: Tensor, text: Tensor, images: Tensor, texts: Tensor, first: int) -> Tensor:
    """Cross entropy in both directions; row k belongs to column first + k."""
    labels = torch.arange(first, first + len(image), device=image.device)
    by_image = F.cross_entropy(image @ texts.T / 0.1, labels)
    by_text = F.cross_entropy(text @ images.T / 0.1, labels)
    return (by_image + by_text) / 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    image, text = model(batch["pixels"], batch["tokens"])
    return symmetric(image, text, image, text, first=0)


class GatherRows(torch.autograd.Function):
    """The rows of all ranks, in the order of the ranks."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.start = dist.get_rank() * len(rows)
        ctx.stop = ctx.start + len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad[ctx.start : ctx.stop]


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    image, text = ddp(shard["pixels"], shard["tokens"])
    images, texts = GatherRows.apply(image), GatherRows.apply(text)
    symmetric(image, text, images, texts, first=rank.rank * len(image)).backward()


case = Case(model=ImageText, batch=pairs, loss=loss, layout="1x4")
