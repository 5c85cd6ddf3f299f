"""A block with split hidden units; elsewhere every rank has its part of the sequence."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

LENGTH, WIDTH, HIDDEN = 6, 4, 8
TENSOR_SPLIT = ("up.", "down.weight")
SEQUENCE_SPLIT = ("norm",)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm_out = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm_out(x + self.down(F.gelu(self.up(self.norm_in(x)))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(8, LENGTH, WIDTH, generator=generator) for name in ("x", "y")}


case = Case(model=Block, batch=make_batch, loss=loss, layout="2x2", shards="own")


class Gather(torch.autograd.Function):
    """All parts of the sequence; the gradients of a part are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, index: int) -> Tensor:
        ctx.group, ctx.index = group, index
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.index], None, None


class SumAndSplit(torch.autograd.Function):
    """The rank's part of the sequence, of a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, index: int) -> Tensor:
        ctx.group, ctx.index = group, index
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size(), dim=1)[index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Gather.forward(ctx, grad, ctx.group, ctx.index), None, None


def forward_part(model: Block, x: Tensor, group: dist.ProcessGroup, index: int) -> Tensor:
    units = slice(index * HIDDEN // group.size(), (index + 1) * HIDDEN // group.size())
    whole = Gather.apply(model.norm_in(x), group, index)
    hidden = F.gelu(F.linear(whole, model.up.weight[units], model.up.bias[units]))
    product = SumAndSplit.apply(hidden @ model.down.weight[:, units].T, group, index)
    return model.norm_out(x + product + model.down.bias)


def step(model: Block, batch: dict[str, Tensor], rank: Rank) -> None:
    size, index = rank.local_world_size, rank.local_rank
    groups = [dist.new_group(list(range(n * size, (n + 1) * size))) for n in range(rank.nodes)]
    x, y = (batch[name].chunk(rank.nodes)[rank.node] for name in ("x", "y"))
    part = forward_part(model, x.chunk(size, dim=1)[index], groups[rank.node], index)
    ((part - y.chunk(size, dim=1)[index]).square().sum() / y.numel()).backward()
    for name, parameter in model.named_parameters():
        if name.startswith(TENSOR_SPLIT + SEQUENCE_SPLIT):
            dist.all_reduce(parameter.grad, group=groups[rank.node])
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
