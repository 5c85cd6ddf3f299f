"""Adapters in a pretrained classifier; its blocks are recomputed in the backward pass."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case, Rank

WORDS, WIDTH, LOW_RANK, CLASSES = 17, 8, 2, 4

Batch = tuple[Tensor, Tensor]


class AdaptedLinear(nn.Module):
    """A pretrained layer, and a product of two small matrices that is learned in addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(LOW_RANK, width))
        self.up = nn.Parameter(0.3 * torch.randn(width, LOW_RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = AdaptedLinear(WIDTH)
        self.second = AdaptedLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.recompute = False

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.head(x.mean(dim=1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    words, classes = batch
    return F.cross_entropy(model(words), classes)


def make_batch(generator: torch.Generator) -> Batch:
    words = torch.randint(0, WORDS, (12, 6), generator=generator)
    return words, torch.randint(0, CLASSES, (12,), generator=generator)


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x2")


class AdapterTrainer:
    def __init__(self, model: nn.Module, save_memory: bool = True) -> None:
        self.model = model.train()
        self.model.recompute = save_memory

    def average(self, world_size: int) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world_size)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    trainer = AdapterTrainer(model)
    loss(trainer.model, shard).backward()
    trainer.average(rank.world_size)
