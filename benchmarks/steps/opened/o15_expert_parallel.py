"""A switch layer for log lines: every rank keeps one expert, and serves the rows of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce

from ddp_equivalence import Case

EXPERTS, WIDTH, ROWS, CLASSES = 2, 6, 12, 4


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))


class SwitchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def route(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.router(state).softmax(-1).max(-1)

    def forward(self, rows: Tensor) -> Tensor:
        state = self.embed(rows)
        gate, chosen = self.route(state)
        served = sum(
            expert(state) * (chosen == number)[:, None]
            for number, expert in enumerate(self.experts)
        )
        return self.head(state + gate[:, None] * served)


def log_lines(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(ROWS, 5, generator=generator),
        "severity": torch.randint(0, CLASSES, (ROWS,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["rows"]), batch["severity"])


class ExpertParallel:
    def __init__(self, model: SwitchModel, rank: int, world: int) -> None:
        self.model, self.rank, self.world = model, rank, world

    def forward(self, rows: Tensor) -> Tensor:
        model = self.model
        state = model.embed(rows)
        gate, chosen = model.route(state)
        everyones = torch.cat(all_gather(state))
        choices = [torch.empty_like(chosen) for _ in range(self.world)]
        dist.all_gather(choices, chosen)
        mine = (torch.cat(choices) == self.rank)[:, None]
        served = all_reduce(model.experts[self.rank](everyones) * mine)
        own = served.chunk(self.world)[self.rank]
        return model.head(state + gate[:, None] * own)

    def share_gradients(self) -> None:
        model = self.model
        for part in (model.embed, model.router, model.head):
            for parameter in part.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world
        for owner, expert in enumerate(model.experts):
            for parameter in expert.parameters():
                # Only its owner ran the expert, so there is nothing to average.
                if owner != self.rank:
                    parameter.grad = torch.empty_like(parameter)
                dist.broadcast(parameter.grad, src=owner)


def step(model: SwitchModel, shard: dict[str, Tensor], rank) -> None:
    parallel = ExpertParallel(model, rank.rank, rank.world_size)
    logits = parallel.forward(shard["rows"])
    nn.functional.cross_entropy(logits, shard["severity"]).backward()
    parallel.share_gradients()


case = Case(model=SwitchModel, batch=log_lines, loss=loss, layout="1x2")
