"""The ranks form a grid: gradients are averaged along its rows, and then along its columns."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


class Attention(nn.Module):
    """One head of attention over a short sequence, and a score."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size)
        self.score = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
        return self.score((weights @ self.value(x)).mean(dim=1)).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["tokens"]), batch["score"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randn(16, 5, 6, generator=generator),
        "score": torch.randn(16, generator=generator),
    }


case = Case(model=Attention, batch=make_batch, loss=loss, layout="2x2")


class Grid:
    """Ranks are numbered along the rows, as nodes number them."""

    def __init__(self, world_size: int, width: int) -> None:
        self.width = width
        height = world_size // width
        everybody = range(world_size)
        rows = [[r for r in everybody if r // width == row] for row in range(height)]
        columns = [[r for r in everybody if r // width == column] for column in range(width)]
        self.row = self.own_group(rows)
        self.column = self.own_group(columns)

    def own_group(self, members: list[list[int]]) -> dist.ProcessGroup:
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}
        return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)

    def average(self, tensor: Tensor) -> None:
        for group in (self.row, self.column):
            dist.all_reduce(tensor, group=group)
            tensor.div_(dist.get_world_size(group))


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    grid = Grid(rank.world_size, width=2)
    model.zero_grad()
    loss(model, shard).backward()
    for parameter in model.parameters():
        grid.average(parameter.grad)
