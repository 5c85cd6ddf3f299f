"""Gradients of micro-batches go into one buffer while they arrive; it is reduced once."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

MICRO_BATCHES = 3

Batch = tuple[Tensor, Tensor]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.across = nn.Linear(4, 4)
        self.within = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + F.gelu(self.across(x.mT).mT)
        x = x + F.gelu(self.within(x))
        return self.head(x.mean(dim=1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    rows, classes = batch
    return F.cross_entropy(model(rows), classes)


def make_batch(generator: torch.Generator) -> Batch:
    rows = torch.randn(12, 4, 5, generator=generator)
    return rows, torch.randint(0, 3, (12,), generator=generator)


case = Case(model=Mixer, batch=make_batch, loss=loss, layout="1x2")


class MainGradients:
    """One contiguous buffer with a view for each parameter, which hooks fill."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters), dtype=dtype)
        self.buffer = self.buffer.to(self.parameters[0].device)
        self.handles, end = [], 0
        for parameter in self.parameters:
            start, end = end, end + parameter.numel()
            view = self.buffer[start:end].view_as(parameter)
            hook = self.make_hook(view)
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def make_hook(self, view: Tensor) -> Callable[[Tensor], None]:
        def add_to_buffer(parameter: Tensor) -> None:
            view.add_(parameter.grad)

        return add_to_buffer

    def reduce(self, world_size: int) -> None:
        self.buffer.div_(world_size)
        dist.all_reduce(self.buffer)

    def install(self) -> None:
        """Gives the sums to the optimizer, as the gradients of the parameters."""
        for handle in self.handles:
            handle.remove()
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, self.buffer.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


def micro_batches(batch: Batch) -> Iterator[Batch]:
    yield from zip(*(value.chunk(MICRO_BATCHES) for value in batch), strict=True)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    gradients = MainGradients(model)
    for part in micro_batches(shard):
        (loss(model, part) / MICRO_BATCHES).backward()
    gradients.reduce(rank.world_size)
    gradients.install()
