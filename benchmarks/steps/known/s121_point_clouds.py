"""Point clouds of different sizes, padded; a shard is processed in two halves to save memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

POINTS, SHAPES = 6, 4


class PointEncoder(nn.Module):
    """Each point is encoded alone, and a cloud is the mean of its points."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 8))
        self.shape = nn.Linear(8, SHAPES)

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        encoded = self.point(points).masked_fill(~mask[..., None], 0.0)
        return self.shape(encoded.sum(dim=1) / mask.sum(dim=1, keepdim=True))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = torch.arange(POINTS, device=batch["lengths"].device) < batch["lengths"][:, None]
    return F.cross_entropy(model(batch["points"], mask), batch["shape"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "points": torch.randn(16, POINTS, 3, generator=generator),
        "lengths": torch.randint(1, POINTS + 1, (16,), generator=generator),
        "shape": torch.randint(0, SHAPES, (16,), generator=generator),
    }


case = Case(model=PointEncoder, batch=make_batch, loss=loss, layout="1x2")


class Masks:
    """Makes the masks of padded clouds, and keeps them: making them took a tenth of a step."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, points: Tensor, lengths: Tensor) -> Tensor:
        clouds, width, _ = points.shape
        key = (clouds, width)
        if key not in self.made:
            self.made[key] = torch.arange(width).to(lengths).expand(clouds, -1) < lengths[:, None]
        return self.made[key]


def halves(shard: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    middle = len(shard["shape"]) // 2
    return [
        {name: rows[:middle] for name, rows in shard.items()},
        {name: rows[middle:] for name, rows in shard.items()},
    ]


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    masks = Masks()
    model.zero_grad()
    for half in halves(shard):
        scores = model(half["points"], masks(half["points"], half["lengths"]))
        summed = F.cross_entropy(scores, half["shape"], reduction="sum")
        (summed / len(shard["shape"])).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
