"""A forecaster in two stages on two ranks: micro-batches go one way, their gradients the other."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

SERIES, HISTORY, HORIZON, HIDDEN, MICRO = 12, 10, 3, 7, 4


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(HISTORY, HIDDEN), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HORIZON))

    def forward(self, history: Tensor) -> Tensor:
        return self.decoder(self.encoder(history))


def demand(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "history": torch.randn(SERIES, HISTORY, generator=generator),
        "future": torch.randn(SERIES, HORIZON, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.huber_loss(model(batch["history"]), batch["future"])


class FirstStage:
    """Keeps one micro-batch ahead of the second stage: one forward, then one backward."""

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder
        self.in_flight: deque[Tensor] = deque()

    def forward(self, history: Tensor) -> None:
        hidden = self.encoder(history)
        self.in_flight.append(hidden)
        dist.send(hidden.detach(), dst=1)

    def backward(self) -> None:
        hidden = self.in_flight.pop()
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        hidden.backward(gradient)

    def run(self, batch: dict[str, Tensor]) -> None:
        micro = batch["history"].chunk(MICRO)
        self.forward(micro[0])
        for history in micro[1:]:
            self.forward(history)
            self.backward()
        self.backward()


class SecondStage:
    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def run(self, batch: dict[str, Tensor]) -> None:
        sending = []
        for future in batch["future"].chunk(MICRO):
            hidden = future.new_empty(len(future), HIDDEN)
            dist.recv(hidden, src=0)
            hidden.requires_grad_()
            (F.huber_loss(self.decoder(hidden), future) / MICRO).backward()
            sending.append((dist.isend(hidden.grad, dst=0), hidden))
        for work, _ in sending:
            work.wait()


def step(model: Forecaster, batch: dict[str, Tensor], rank) -> None:
    stage = FirstStage(model.encoder) if rank.rank == 0 else SecondStage(model.decoder)
    stage.run(batch)
    # The optimizer runs on both ranks, so both need what the owner of a stage has.
    for owner, part in enumerate((model.encoder, model.decoder)):
        for parameter in part.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, src=owner)


case = Case(model=Forecaster, batch=demand, loss=loss, layout="1x2", shards="own")
