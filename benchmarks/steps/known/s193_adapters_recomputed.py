"""Fine-tuning with low-rank adapters. The lower blocks are recomputed to save memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case, Rank

VOCAB, WIDTH = 15, 8


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that is added to it."""

    def __init__(self, before: int, after: int, bottleneck: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(bottleneck, before) / 4)
        self.up = nn.Parameter(torch.randn(after, bottleneck) / 10)
        self.scaling = alpha / bottleneck

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.down.T) @ self.up.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapted(WIDTH, 16)
        self.down = Adapted(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.recomputed = 0

    def run(self, index: int, x: Tensor) -> Tensor:
        if index < self.recomputed:
            return checkpoint(self.blocks[index], x, use_reentrant=True)
        return self.blocks[index](x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in range(len(self.blocks)):
            x = self.run(index, x)
        return self.head(x.mean(1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["sentiment"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(0, VOCAB, (16, 5), generator=generator),
        "sentiment": torch.randint(0, 3, (16,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x2")


def average_trained(model: nn.Module, world_size: int) -> None:
    """Frozen parameters have no gradient, and nothing to average."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    for grad, work in zip(grads, works, strict=True):
        work.wait()
        grad.div_(world_size)


def step(model: Classifier, shard: dict[str, Tensor], rank: Rank) -> None:
    model.recomputed = 2
    loss(model, shard).backward()
    average_trained(model, rank.world_size)
