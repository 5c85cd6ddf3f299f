"""A mixture of experts: each rank computes two of four experts, for the tokens of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

WIDTH, HIDDEN, EXPERTS = 6, 9, 4


class AllToAll(torch.autograd.Function):
    """Part r of ``x`` goes to rank r. The way back is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return AllToAll.apply(grad)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.rank: Rank | None = None

    def compute(self, slots: Tensor, first: int = 0) -> Tensor:
        mine = slice(first, first + len(slots))
        return F.gelu(slots @ self.up[mine]) @ self.down[mine]

    def compute_on_ranks(self, slots: Tensor) -> Tensor:
        rank = self.rank
        assert rank is not None
        local = EXPERTS // rank.world_size
        capacity = slots.shape[1]
        received = AllToAll.apply(slots).view(rank.world_size, local, capacity, WIDTH)
        by_expert = received.transpose(0, 1).reshape(local, -1, WIDTH)
        outputs = self.compute(by_expert, first=local * rank.rank)
        by_source = outputs.view(rank.world_size, local, capacity, WIDTH)
        return AllToAll.apply(by_source).reshape(EXPERTS, capacity, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, EXPERTS)
        slot = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slots = x.new_zeros(EXPERTS, len(x), WIDTH).index_put((expert, slot), x)
        compute = self.compute if self.rank is None else self.compute_on_ranks
        return x + gate.unsqueeze(-1) * compute(slots)[expert, slot]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDTH), Experts(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["outputs"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = torch.randn(24, 5, generator=generator)
    return {"inputs": inputs, "outputs": inputs[:, :3].sin() + inputs[:, 2:].cos()}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.rank = rank
    loss(model, shard).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
