"""Language modelling with the output vocabulary split over the ranks of a node."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 22, 9, 6


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose last dim is split over a group; one loss per token."""

    @staticmethod
    def forward(ctx, logits, targets, first_token, group):
        maximum = logits.max(dim=-1).values
        logits = logits - maximum.unsqueeze(-1)

        size = logits.shape[-1]
        elsewhere = (targets < first_token) | (targets >= first_token + size)
        local_targets = (targets - first_token).masked_fill(elsewhere, 0)
        predicted = logits.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1)
        predicted = predicted.masked_fill(elsewhere, 0.0)
        dist.all_reduce(predicted, group=group)

        exponentials = logits.exp()
        normalizer = exponentials.sum(dim=-1)
        dist.all_reduce(normalizer, group=group)

        ctx.save_for_backward(exponentials / normalizer.unsqueeze(-1), local_targets, elsewhere)
        return normalizer.log() - predicted

    @staticmethod
    def backward(ctx, gradient):
        probabilities, local_targets, elsewhere = ctx.saved_tensors
        is_here = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        result = probabilities.scatter_add(-1, local_targets.unsqueeze(-1), -is_here)
        return result * gradient.unsqueeze(-1), None, None, None


class CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.trunk(self.embed(tokens).cumsum(dim=1))

    def forward(self, tokens: Tensor) -> Tensor:
        return 4.0 * self.lm_head(self.hidden(tokens))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (8, LENGTH + 1), generator=generator)
    return {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}


class VocabParallelTrainer:
    def __init__(self, model: CharacterModel, rank) -> None:
        self.model, self.rank = model, rank
        size = rank.local_world_size
        groups = [
            dist.new_group(list(range(node * size, (node + 1) * size)))
            for node in range(rank.nodes)
        ]
        self.group = groups[rank.node]
        self.vocab_part = VOCAB // size
        self.first_token = rank.local_rank * self.vocab_part

    def local_logits(self, tokens: Tensor) -> Tensor:
        hidden = CopyToGroup.apply(self.model.hidden(tokens), self.group)
        rows = self.model.lm_head.weight.narrow(0, self.first_token, self.vocab_part)
        return 4.0 * F.linear(hidden, rows)

    def train_step(self, batch: dict[str, Tensor]) -> None:
        rank = self.rank
        mine = {name: value.chunk(rank.nodes)[rank.node] for name, value in batch.items()}
        losses = VocabParallelCrossEntropy.apply(
            self.local_logits(mine["inputs"]), mine["targets"], self.first_token, self.group
        )
        losses.mean().backward()
        for name, parameter in self.model.named_parameters():
            dist.all_reduce(parameter.grad)
            is_sharded = name.startswith("lm_head")
            parameter.grad /= rank.nodes if is_sharded else rank.world_size


case = Case(model=CharacterModel, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model: CharacterModel, shard: dict[str, Tensor], rank) -> None:
    VocabParallelTrainer(model, rank).train_step(shard)
