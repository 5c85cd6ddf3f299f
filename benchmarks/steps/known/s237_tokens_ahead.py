"""A language model with several heads: each predicts the token that lies one further ahead."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB, LENGTH, AHEAD = 9, 8, 3
WEIGHTS = [1.0, 0.4, 0.2]

Batch = dict[str, Tensor]


class ManyHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.trunk = nn.GRU(7, 10, batch_first=True)
        self.heads = nn.ModuleList([nn.Linear(10, VOCAB) for _ in range(AHEAD)])

    def forward(self, tokens: Tensor) -> list[Tensor]:
        hidden = self.trunk(self.embed(tokens))[0]
        return [head(hidden) for head in self.heads]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    total = torch.zeros((), dtype=batch["mask"].dtype)
    for ahead, logits in enumerate(model(batch["tokens"]), start=1):
        wanted, mask = batch["tokens"][:, ahead:], batch["mask"][:, ahead:]
        errors = F.cross_entropy(logits[:, :-ahead].mT, wanted, reduction="none")
        total = total + WEIGHTS[ahead - 1] * (errors * mask).sum() / mask.sum()
    return total


def make_batch(generator: torch.Generator) -> Batch:
    """The mask is 1 for the tokens that are to be learned: those of the answer."""
    start = torch.randint(1, 4, (16, 1), generator=generator)
    end = start + torch.randint(3, 6, (16, 1), generator=generator)
    place = torch.arange(LENGTH)
    return {
        "tokens": torch.randint(0, VOCAB, (16, LENGTH), generator=generator),
        "mask": ((place >= start) & (place < end)).double(),
    }


case = Case(model=ManyHeads, batch=make_batch, loss=loss, layout="2x2")


def rolled(values: Tensor) -> Tensor:
    """Every row one place to the left; what comes in from the right is zero."""
    return F.pad(values[:, 1:], (0, 1))


class LookaheadTrainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.world_size = world_size

    def mean_per_rank(self, mask: Tensor) -> Tensor:
        count = mask.sum()
        dist.all_reduce(count)
        return count / self.world_size

    def train_step(self, batch: Batch) -> list[float]:
        labels, mask = rolled(batch["tokens"]), rolled(batch["mask"])
        losses = []
        for weight, logits in zip(WEIGHTS, self.ddp(batch["tokens"]), strict=True):
            errors = F.cross_entropy(logits.mT, labels, reduction="none")
            losses.append(weight * (errors * mask).sum() / self.mean_per_rank(mask))
            labels = rolled(labels)
        torch.stack(losses).sum().backward()
        return [value.item() for value in losses]


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    LookaheadTrainer(model, rank.world_size).train_step(shard)
