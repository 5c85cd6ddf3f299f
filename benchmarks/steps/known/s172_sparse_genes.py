"""Predicts tissue from gene activity. An L1 penalty keeps the first layer sparse."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

GENES, TISSUES = 14, 4
SPARSITY = 0.02


class TissueModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.genes = nn.Linear(GENES, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, TISSUES)

    def forward(self, activity: Tensor) -> Tensor:
        return self.head(F.softplus(self.genes(activity) * self.scale))

    def penalty(self) -> Tensor:
        return SPARSITY * self.genes.weight.abs().sum()


def errors(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["activity"]), batch["tissue"], reduction="sum")


def loss(model: TissueModel, batch: dict[str, Tensor]) -> Tensor:
    return errors(model, batch) / len(batch["tissue"]) + model.penalty()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "activity": torch.randn(20, GENES, generator=generator).exp(),
        "tissue": torch.randint(TISSUES, (20,), generator=generator),
    }


case = Case(model=TissueModel, batch=make_batch, loss=loss, layout="2x2")


class Accumulator:
    """Adds up the gradients of micro-batches on the rank, and then those of the ranks."""

    def __init__(self, model: TissueModel, rank: Rank, micro_batch: int) -> None:
        self.model = model
        self.world_size = rank.world_size
        self.micro_batch = micro_batch

    def parts(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        columns = [value.split(self.micro_batch) for value in batch.values()]
        return [dict(zip(batch, part, strict=True)) for part in zip(*columns, strict=True)]

    def examples(self, batch: dict[str, Tensor]) -> Tensor:
        count = torch.tensor(len(batch["tissue"]), device=batch["tissue"].device)
        dist.all_reduce(count)
        return count

    def backward(self, batch: dict[str, Tensor]) -> None:
        parts, examples = self.parts(batch), self.examples(batch)
        for part in parts:
            error = errors(self.model, part) / examples
            penalty = self.model.penalty() / self.world_size  # gradients are summed over ranks
            (error + penalty).backward()

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def step(model: TissueModel, shard: dict[str, Tensor], rank: Rank) -> None:
    model.zero_grad()
    accumulator = Accumulator(model, rank, micro_batch=2)
    accumulator.backward(shard)
    accumulator.reduce()
