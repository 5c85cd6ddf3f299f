"""Next-token prediction with the output layer split over the vocabulary, in two replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, CONTEXT, EXAMPLES = 14, 8, 3, 16
REPLICAS, SHARDS = 2, 2


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(CONTEXT * WIDTH, WIDTH), nn.Tanh())
        self.unembed = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def features(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids).flatten(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.unembed(self.features(ids))


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits of which each rank holds a range of the vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets, first, group):
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits = logits - peak.unsqueeze(-1)
        outside = (targets < first) | (targets >= first + logits.shape[-1])
        local_targets = (targets - first).masked_fill(outside, 0)
        rows = torch.arange(len(targets))
        predicted = logits[rows, local_targets].masked_fill(outside, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = logits.exp()
        normaliser = exponentials.sum(-1)
        dist.all_reduce(normaliser, group=group)
        softmax = exponentials / normaliser.unsqueeze(-1)
        ctx.save_for_backward(softmax, local_targets)
        return normaliser.log() - predicted

    @staticmethod
    def backward(ctx, grad):
        softmax, local_targets = ctx.saved_tensors
        rows = torch.arange(len(local_targets))
        grad_logits = softmax.clone()
        grad_logits[rows, local_targets] -= 1.0
        return grad_logits * grad.unsqueeze(-1), None, None, None


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["next"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(VOCABULARY, (EXAMPLES, CONTEXT), generator=generator),
        "next": torch.randint(VOCABULARY, (EXAMPLES,), generator=generator),
    }


class ShardedTrainer:
    def __init__(self, model: NextToken) -> None:
        self.model = model
        self.replica, self.shard = divmod(dist.get_rank(), SHARDS)
        ranks = torch.arange(REPLICAS * SHARDS).view(REPLICAS, SHARDS)
        self.shards = [dist.new_group(row.tolist()) for row in ranks][self.replica]
        self.replicas = [dist.new_group(column.tolist()) for column in ranks.T][self.shard]

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        features = _CopyToShards.apply(self.model.features(ids), self.shards)
        weight = self.model.unembed.weight.chunk(SHARDS)[self.shard]
        first = self.shard * len(weight)
        logits = F.linear(features, weight)
        return _VocabularyParallelCrossEntropy.apply(logits, targets, first, self.shards)

    def step(self, batch: dict[str, Tensor]) -> None:
        ids, targets = (batch[key].chunk(REPLICAS)[self.replica] for key in ("ids", "next"))
        self.losses(ids, targets).mean().backward()
        dist.all_reduce(self.model.unembed.weight.grad, group=self.shards)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= REPLICAS


case = Case(model=NextToken, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model, shard, rank):
    ShardedTrainer(model).step(shard)
