"""Matrices get an optimizer of their own, and everything else gets Adam. The loss is scaled."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

WORDS = 15

Batch = dict[str, Tensor]


class Tagger(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.tag = nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        beside = torch.cat([x, x.roll(1, dims=1)], dim=-1)
        return self.tag(self.norm(x + F.gelu(self.mix(beside))))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["tags"].flatten())


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "words": torch.randint(WORDS, (8, 6), generator=generator),
        "tags": torch.randint(4, (8, 6), generator=generator),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


class Scaler:
    """Scales the loss, and takes the factor out of the gradients before the optimizers run."""

    def __init__(self, scale: float = 2.0**12) -> None:
        self.scale = scale

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.scale

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether all gradients of this optimizer are finite."""
        finite = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.scale)
                finite = finite and bool(parameter.grad.isfinite().all())
        return finite


def build_optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Embeddings look like matrices, but their rows are trained as vectors."""
    named = list(named)
    matrices = [p for name, p in named if p.ndim == 2]
    others = [p for name, p in named if p.ndim < 2 or "embed" in name]
    return [
        torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True),
        torch.optim.AdamW(others, lr=3e-4, weight_decay=0.0),
    ]


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizers = build_optimizers(ddp.named_parameters())
    scaler = Scaler()
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler(loss(ddp, shard)).backward()
    finite = [scaler.unscale(optimizer) for optimizer in optimizers]
    if all(finite):
        for optimizer in optimizers:
            optimizer.step()
