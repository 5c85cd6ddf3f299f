"""Actor and critic are separate networks: each is averaged over the moves that it is trained on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

MOVES = 5


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, MOVES))
        self.critic = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))


def losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of every move: forced moves teach the actor nothing."""
    logp = F.log_softmax(model.actor(batch["state"]), dim=-1)
    chosen = logp.gather(1, batch["move"][:, None]).squeeze(1)
    values = model.critic(batch["state"]).squeeze(1)
    return -chosen * batch["advantage"] * batch["free"], (values - batch["outcome"]) ** 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    policy, value = losses(model, batch)
    return policy.sum() / batch["free"].sum() + value.mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "state": torch.randn(18, 7, generator=generator),
        "move": torch.randint(0, MOVES, (18,), generator=generator),
        "advantage": torch.randn(18, generator=generator),
        "free": (torch.rand(18, generator=generator) < 0.6).double(),
        "outcome": torch.randn(18, generator=generator),
    }


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x3")


class Averager:
    """Reduces a gradient as soon as it is complete."""

    def __init__(self) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, module: nn.Module, count: Tensor) -> None:
        dist.all_reduce(count)
        self.count = count
        for parameter in module.parameters():
            self.handles.append(parameter.register_post_accumulate_grad_hook(self.reduce))

    def reduce(self, parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.count

    def detach(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    model.zero_grad()
    averager = Averager()
    averager.attach(model.actor, shard["free"].sum())
    averager.attach(model.critic, torch.tensor(len(shard["outcome"]), device=rank.device))
    policy, value = losses(model, shard)
    policy.sum().backward()
    value.sum().backward()
    averager.detach()
