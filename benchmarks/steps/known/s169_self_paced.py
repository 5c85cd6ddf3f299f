"""Self-paced learning: examples that are harder than the average one count less at first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

SOFTNESS = 0.5


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, stride=2, padding=1)
        self.hidden = nn.Linear(5 * 16, 12)
        self.head = nn.Linear(12, 6)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv(images)).flatten(1)
        return self.head(torch.tanh(self.hidden(x)))


class Ranks:
    """What is exchanged between the ranks besides gradients."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def total(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values.mean()) / self.world_size


class Curriculum:
    """Weighs examples by how their loss compares with the mean loss of the batch."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def weights(self, losses: Tensor) -> Tensor:
        pace = self.ranks.mean(losses)
        return torch.sigmoid((pace - losses.detach()) / SOFTNESS)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        examples = self.ranks.total(torch.tensor(len(losses), device=losses.device))
        return (self.weights(losses) * losses).sum() / examples


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Curriculum(Ranks(1))(model(batch["images"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": 2 * torch.randn(15, 1, 8, 8, generator=generator),
        "labels": torch.randint(6, (15,), generator=generator),
    }


case = Case(model=Digits, batch=make_batch, loss=loss, layout="1x3", shards="8+5+2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    curriculum = Curriculum(Ranks(rank.world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    curriculum(model(shard["images"]), shard["labels"]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
