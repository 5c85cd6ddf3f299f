"""Click prediction: impressions have importance weights, and the loss is their weighted mean."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

ITEMS, SLOTS = 25, 4


class ClickModel(nn.Module):
    """Sums the embeddings of the items shown, and adds what is known of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, 6, mode="sum")
        self.user = nn.Linear(3, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, items: Tensor, user: Tensor) -> Tensor:
        hidden = torch.relu(self.items(items) + self.user(user))
        return self.out(hidden).squeeze(-1)


def weighted_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        model(batch["items"], batch["user"]), batch["click"], batch["weight"], reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return weighted_sum(model, batch) / batch["weight"].sum()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "items": torch.randint(0, ITEMS, (16, SLOTS), generator=generator),
        "user": torch.randn(16, 3, generator=generator),
        "click": torch.randint(0, 2, (16,), generator=generator).double(),
        "weight": 0.2 + 2 * torch.rand(16, generator=generator),
    }


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="1x2")


def total(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One message for all the sums that a batch needs."""
    packed = torch.stack([value.detach().long() for value in values.values()])
    dist.all_reduce(packed)
    return dict(zip(values, packed.unbind(), strict=True))


def sums_of(shard: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "impressions": torch.tensor(len(shard["click"]), device=shard["click"].device),
        "clicks": shard["click"].sum(),
        "weight": shard["weight"].sum(),
    }


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    totals = total(sums_of(shard))
    model.zero_grad(set_to_none=True)
    (weighted_sum(model, shard) / totals["weight"]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
