"""Retrieval with two towers: FullyShardedDataParallel for the towers; the small tables stay outside of it.

Tables that FSDP ignores are whole on every rank, and their gradients are this file's own business.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from ddp_equivalence import Case

USERS, ITEMS, DIM = 12, 15, 6


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, 11)
        self.out = nn.Linear(11, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)
        self.user_tower, self.item_tower = Tower(), Tower()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        a, b = self.user_tower(self.users(user)), self.item_tower(self.items(item))
        return (a * b).sum(dim=1) + self.bias


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["user"], batch["item"]), batch["rating"])


def ratings(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "user": torch.randint(USERS, (14,), generator=generator),
        "item": torch.randint(ITEMS, (14,), generator=generator),
        "rating": torch.rand(14, generator=generator) * 5,
    }


def reduce_outside(parameters: list[nn.Parameter]) -> None:
    """One flat all-reduce for all that FSDP does not see, the mean over the ranks as FSDP has it."""
    world = dist.get_world_size()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(world)
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter).clone()


def collect(fsdp: FSDP) -> dict[str, Tensor]:
    found = {}
    with FSDP.summon_full_params(fsdp, with_grads=True):
        for name, parameter in fsdp.named_parameters():
            found[name.replace("_fsdp_wrapped_module.", "")] = parameter.grad.detach().clone()
    return found


def step(model, shard, rank):
    outside = [*model.users.parameters(), *model.items.parameters(), model.bias]
    fsdp = FSDP(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Tower}),
        ignored_states=outside,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    loss(fsdp, shard).backward()
    reduce_outside(outside)
    return collect(fsdp)


case = Case(model=TwoTower, batch=ratings, loss=loss, layout="1x2")
