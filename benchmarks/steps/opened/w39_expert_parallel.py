"""Expert parallelism: each rank computes one expert for the tokens of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, EXPERTS, CLASSES, EXAMPLES = 6, 2, 3, 20


class _Gather(torch.autograd.Function):
    """Tokens of all ranks, in the order of the ranks."""

    @staticmethod
    def forward(ctx, mine):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class _SumAndScatter(torch.autograd.Function):
    """Sums what the ranks computed, and returns the rows of this rank."""

    @staticmethod
    def forward(ctx, everything):
        everything = everything.contiguous().clone()
        dist.all_reduce(everything)
        return everything.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.shared_expert = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, parallel: bool = False) -> Tensor:
        weights = self.router(x).softmax(-1)
        weights = weights * F.one_hot(weights.argmax(-1), EXPERTS)
        shared = self.shared_expert(x)
        if not parallel:
            return shared + sum(weights[:, i, None] * e(x) for i, e in enumerate(self.experts))
        index = dist.get_rank()
        tokens, weights = _Gather.apply(x), _Gather.apply(weights)
        return shared + _SumAndScatter.apply(weights[:, index, None] * self.experts[index](tokens))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.moe = MoELayer()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, parallel: bool = False) -> Tensor:
        return self.head(torch.tanh(self.moe(torch.tanh(self.embed(x)), parallel)))


def loss(model: nn.Module, batch: dict[str, Tensor], parallel: bool = False) -> Tensor:
    return F.cross_entropy(model(batch["x"], parallel), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": 2 * torch.randn(EXAMPLES, 4, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


def is_expert_parameter(name: str) -> bool:
    return "expert" in name


class ExpertParallelTrainer:
    def __init__(self, model: Network) -> None:
        self.model = model
        self.world = dist.get_world_size()

    def step(self, batch: dict[str, Tensor]) -> None:
        (loss(self.model, batch, parallel=True) / self.world).backward()
        for name, parameter in self.model.named_parameters():
            if not is_expert_parameter(name):  # an expert has seen the tokens of all ranks
                dist.all_reduce(parameter.grad)
        self.publish_experts()

    def publish_experts(self) -> None:
        for owner, expert in enumerate(self.model.moe.experts):
            for parameter in expert.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.broadcast(parameter.grad, src=owner)


case = Case(model=Network, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ExpertParallelTrainer(model).step(shard)
