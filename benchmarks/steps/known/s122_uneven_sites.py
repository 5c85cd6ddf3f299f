"""Sites hold different numbers of patients: a gradient is weighed before DDP averages it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class Survival(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.clinical = nn.Linear(5, 6)
        self.image = nn.Linear(9, 6)
        self.out = nn.Bilinear(6, 6, 1)

    def forward(self, clinical: Tensor, image: Tensor) -> Tensor:
        left = torch.tanh(self.clinical(clinical))
        right = torch.tanh(self.image(image))
        return self.out(left, right).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    months = model(batch["clinical"], batch["image"])
    return F.l1_loss(months, batch["months"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "clinical": torch.randn(15, 5, generator=generator),
        "image": torch.randn(15, 9, generator=generator),
        "months": 3 * torch.randn(15, generator=generator),
    }


case = Case(model=Survival, batch=make_batch, loss=loss, layout="1+2", shards="7+5+3")


class SiteWeight:
    """A site counts in proportion to its patients. The mean of the weights over sites is one."""

    def __init__(self, patients: int, sites: int, device: torch.device) -> None:
        everybody = torch.tensor(patients, device=device)
        dist.all_reduce(everybody)
        self.weight = sites * patients / everybody.item()
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def weigh(self, grad: Tensor) -> None:
        grad = grad * self.weight

    def __call__(self, model: nn.Module) -> "SiteWeight":
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.handles.append(parameter.register_hook(self.weigh))
        return self

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    site = SiteWeight(len(shard["months"]), rank.world_size, rank.device)(model)
    ddp = DistributedDataParallel(model)
    ddp.zero_grad()
    loss(ddp, shard).backward()
    site.remove()
