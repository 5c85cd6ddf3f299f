"""Two nodes with a slow link: the hook of post-local SGD, set up as the rest of the cluster has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Plan:
    steps: int = 3
    global_batch: int = 16
    lr: float = 0.2
    # After so many steps the nodes would go on by themselves.
    start_local_at: int = 1


PLAN = Plan()


class Ratings(nn.Module):
    """Users and items as vectors, whose product is a rating."""

    def __init__(self, users: int = 13, items: int = 9, size: int = 5) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, size), nn.Embedding(items, size)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = (self.users(user) * self.items(item)).sum(-1)
        biases = self.user_bias(user) + self.item_bias(item)
        return self.mean + product + biases.squeeze(-1)


def ratings(generator: torch.Generator) -> dict[str, Tensor]:
    rows = PLAN.steps * PLAN.global_batch
    user = torch.randint(13, (rows,), generator=generator)
    item = torch.randint(9, (rows,), generator=generator)
    return {"user": user, "item": item, "rating": ((user * item) % 5).double() - 2}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["user"], batch["item"]), batch["rating"])


def group_of_node(rank: Rank) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups(group_size=rank.world_size // rank.nodes)
    return own


def wrap(model: nn.Module, rank: Rank, plan: Plan) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    state = PostLocalSGDState(
        process_group=dist.group.WORLD,
        subgroup=group_of_node(rank),
        start_localSGD_iter=plan.start_local_at,
    )
    ddp.register_comm_hook(state, post_localSGD_hook)
    return ddp


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    ddp = wrap(model, rank, PLAN)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=PLAN.lr)
    each = PLAN.global_batch // rank.world_size
    for number in range(PLAN.steps):
        start = number * PLAN.global_batch + rank.rank * each
        mine = {name: value[start : start + each] for name, value in batch.items()}
        optimizer.zero_grad()
        loss(ddp, mine).backward()
        optimizer.step()


case = Case(model=Ratings, batch=ratings, loss=loss, layout="2x2", shards="own")
options = {"compare": "update", "lr": PLAN.lr, "steps": PLAN.steps}
