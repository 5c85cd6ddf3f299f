"""Top-1 mixture of experts with one expert per rank; tokens travel with all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, EXPERTS, OUTPUTS = 8, 3, 4
Z_LOSS = 0.01


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        return exchange(rows, send, receive)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.receive, ctx.send), None, None


def exchange(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), receive, send)
    return result


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def mix(self, hidden: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, gates[rows].unsqueeze(1) * expert(hidden[rows]))
        return mixed


class ExpertParallelDispatcher:
    """Stands in for ``MoE.mix`` when expert ``i`` lives on rank ``i``."""

    def __init__(self, rank) -> None:
        self.rank = rank

    def mix(self, model: MoE, hidden: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        order = choice.argsort(stable=True)
        counts = choice.bincount(minlength=EXPERTS)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send, receive = counts.tolist(), incoming.tolist()

        tokens = AllToAll.apply(hidden[order], send, receive)
        weights = exchange(gates[order], send, receive)
        outputs = weights.unsqueeze(1) * model.experts[self.rank](tokens)
        returned = AllToAll.apply(outputs, receive, send)
        return torch.zeros_like(hidden).index_add(0, order, returned)


def moe_loss(model: MoE, batch: dict[str, Tensor], dispatcher=None) -> Tensor:
    hidden = model.stem(batch["rows"]).tanh()
    logits = model.router(hidden)
    gates, choice = logits.softmax(dim=-1).max(dim=-1)
    if dispatcher is None:
        mixed = model.mix(hidden, gates, choice)
    else:
        mixed = dispatcher.mix(model, hidden, gates, choice)
    prediction = model.head(hidden + mixed)
    z_loss = logits.logsumexp(dim=-1).square().mean()
    return F.mse_loss(prediction, batch["targets"]) + Z_LOSS * z_loss


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": 2 * torch.randn(24, 5, generator=generator),
        "targets": torch.randn(24, OUTPUTS, generator=generator),
    }


def average_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


case = Case(model=MoE, batch=make_batch, loss=moe_loss, layout="1x3")


def step(model: MoE, shard: dict[str, Tensor], rank) -> None:
    moe_loss(model, shard, ExpertParallelDispatcher(rank)).backward()
    average_gradients(model, rank.world_size)
