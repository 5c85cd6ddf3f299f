"""The vocabulary is divided over the ranks of a node, for the embedding and for the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH = 26, 9, 5


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.unembed = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.unembed(self.body(self.embed(words)))


def loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class Reduce(torch.autograd.Function):
    """Sum over the ranks forwards; backwards each rank gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, tensor, group):
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Spread(torch.autograd.Function):
    """Nothing forwards; backwards the sum over the ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class VocabularyParallel:
    def __init__(self, model: Bigram, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        share = WORDS // dist.get_world_size(group)
        self.start = dist.get_rank(group) * share
        self.end = self.start + share

    def place(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the rank's own rows, and which words are elsewhere."""
        elsewhere = (words < self.start) | (words >= self.end)
        return (words - self.start).masked_fill(elsewhere, 0), elsewhere

    def embed(self, words: Tensor) -> Tensor:
        index, elsewhere = self.place(words)
        rows = F.embedding(index, self.model.embed.weight[self.start : self.end])
        return Reduce.apply(rows.masked_fill(elsewhere[..., None], 0), self.group)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden = Spread.apply(hidden, self.group)
        logits = F.linear(hidden, self.model.unembed.weight[self.start : self.end])
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - largest[..., None]
        total = Reduce.apply(logits.exp().sum(dim=-1), self.group)
        index, elsewhere = self.place(targets)
        chosen = logits.gather(-1, index[..., None]).squeeze(-1).masked_fill(elsewhere, 0)
        return (total.log() - Reduce.apply(chosen, self.group)).mean()


def some_words(generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (8, LENGTH + 1), generator=generator)


def step(model: Bigram, words: Tensor, rank) -> None:
    mesh = init_device_mesh("cpu", (rank.nodes, 2), mesh_dim_names=("data", "vocabulary"))
    tensor_group, data_group = mesh.get_group("vocabulary"), mesh.get_group("data")
    words = words.chunk(rank.nodes)[mesh.get_local_rank("data")]
    parallel = VocabularyParallel(model, tensor_group)
    hidden = model.body(parallel.embed(words[:, :-1]))
    parallel.cross_entropy(hidden, words[:, 1:]).backward()
    for weight in (model.embed.weight, model.unembed.weight):
        # Rows of other ranks have a gradient of zero here.
        dist.all_reduce(weight.grad, group=tensor_group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_group)
        parameter.grad.div_(rank.nodes)


case = Case(model=Bigram, batch=some_words, loss=loss, layout="2x2", shards="own")
