"""Pre-training of a small language model; gradients are added up by hand, module by module."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

VOCABULARY = 19
WIDTH = 8


class Block(nn.Module):
    """Mixes every position with the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        places = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        before = normed.cumsum(1) / places
        return x + F.gelu(self.mix(torch.cat([normed, before], dim=-1)))


class LanguageModel(nn.Module):
    """The output layer uses the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.blocks(self.embedding(tokens)))


def summed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return summed_loss(model, tokens) / tokens[:, 1:].numel()


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (12, 10), generator=generator)


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="2x2")


def trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        yield from module.parameters(recurse=False)


def add_up_gradients(model: nn.Module) -> None:
    for parameter in trained_parameters(model):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    model.zero_grad(set_to_none=True)
    predicted = torch.tensor(shard[:, 1:].numel(), device=shard.device)
    dist.all_reduce(predicted)
    (summed_loss(model, shard) / predicted).backward()
    add_up_gradients(model)
