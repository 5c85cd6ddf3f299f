"""Losses on pairs, groups, penalties and global counts, taken so that ranks and big batch agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as with_gradient
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    EXAMPLES,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    LanguageModel,
    average,
    classes,
    global_sum,
    mean_squared_error,
    mlp,
    regression,
    texts,
    token_mean,
    token_sum,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("pairs", right=True)


def triples(generator: torch.Generator) -> Batch:
    """Three rows for each example, and a sign."""
    return {
        "rows": torch.randn(EXAMPLES, 3, ROW, generator=generator),
        "sign": torch.randn(EXAMPLES, generator=generator).sign(),
    }


@programs.loss(batch=triples)
def triplet_margin(model: nn.Module, batch: Batch) -> Tensor:
    """Anchor, positive and negative belong to one example."""
    anchor, positive, negative = model(batch["rows"]).unbind(1)
    return F.triplet_margin_loss(anchor, positive, negative)


@programs.loss(batch=triples)
def cosine_embedding(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CosineEmbeddingLoss on the pair of an example."""
    first, second, _ = model(batch["rows"]).unbind(1)
    return F.cosine_embedding_loss(first, second, batch["sign"], margin=0.2)


@programs.loss(batch=triples)
def margin_ranking(model: nn.Module, batch: Batch) -> Tensor:
    """nn.MarginRankingLoss on the scores of a pair."""
    scores = model(batch["rows"])[..., 0]
    return F.margin_ranking_loss(scores[:, 0], scores[:, 1], batch["sign"], margin=0.5)


@programs.loss(batch=triples)
def preference_against_a_frozen_score(model: nn.Module, batch: Batch) -> Tensor:
    """The chosen row shall win against the rejected one by more than it did before (DPO)."""
    chosen, rejected, before = model(batch["rows"])[..., 0].unbind(1)
    return -F.logsigmoid(0.1 * (chosen - rejected - before.detach())).mean()


@programs.loss(batch=triples)
def clipped_policy_ratio(model: nn.Module, batch: Batch) -> Tensor:
    """The ratio of two policies is clipped for each example (PPO)."""
    new, old, _ = model(batch["rows"])[..., 0].unbind(1)
    ratio = torch.exp(new - old.detach())
    return -torch.minimum(ratio * batch["sign"], ratio.clamp(0.8, 1.2) * batch["sign"]).mean()


@programs.loss()
def weight_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """The squared weights, which are the same on every rank, are added to the mean."""
    penalty = sum(p.square().sum() for p in model.parameters())
    return mean_squared_error(model, batch) + 0.01 * penalty


@programs.loss()
def absolute_weight_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """The absolute weights are added to the mean."""
    return mean_squared_error(model, batch) + 0.01 * sum(p.abs().sum() for p in model.parameters())


def penalised_slope(model: nn.Module, batch: Batch) -> Tensor:
    """The squared norm of every example's own gradient with respect to its row."""
    rows = batch["rows"].clone().requires_grad_()
    outputs = model(rows)
    (slope,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
    return F.mse_loss(outputs, batch["targets"]) + 0.1 * slope.square().sum(1).mean()


@programs.loss(step=ByHand(penalised_slope))
def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """The penalty differentiates twice, and gradients are averaged by hand."""
    return penalised_slope(model, batch)


@programs.loss()
def penalised_activations(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of the squared outputs is added to the error."""
    outputs = model(batch["rows"])
    return F.mse_loss(outputs, batch["targets"]) + 0.1 * outputs.square().mean()


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def token_mean_with_a_global_count(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum over the rank's tokens is divided by the tokens of all ranks."""
    ddp = DistributedDataParallel(model)
    tokens = global_sum(int((shard["targets"] >= 0).sum()), rank)
    (token_sum(ddp, shard) * rank.world_size / tokens).backward()


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def token_mean_reduced_as_a_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Summed gradients are divided by the tokens of all ranks, which are counted afterwards."""
    token_sum(model, shard).backward()
    tokens = global_sum(int((shard["targets"] >= 0).sum()), rank)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= tokens


CLASS_WEIGHTS = (0.2, 1.0, 3.0)


def class_weighted(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss with weights divides by the weights that occur."""
    weights = torch.tensor(CLASS_WEIGHTS, dtype=batch["rows"].dtype)
    return F.cross_entropy(model(batch["rows"]), batch["labels"], weights)


@programs.step(batch=classes, loss=class_weighted)
def class_weights_with_a_global_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The divisor is the sum of the weights of all ranks' labels."""
    ddp = DistributedDataParallel(model)
    weights = torch.tensor(CLASS_WEIGHTS, dtype=shard["rows"].dtype)
    total = global_sum(float(weights[shard["labels"]].sum()), rank)
    summed = F.cross_entropy(ddp(shard["rows"]), shard["labels"], weights, reduction="sum")
    (summed * rank.world_size / total).backward()


@programs.step(shards="10+8+6", layout="1x3")
def uneven_shards_weighted_by_examples(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank's mean counts by the rank's share of the examples."""
    ddp = DistributedDataParallel(model)
    share = len(shard["rows"]) * rank.world_size / global_sum(len(shard["rows"]), rank)
    (share * mean_squared_error(ddp, shard)).backward()


def root_mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """The root of the mean over the whole batch, which is no sum over examples."""
    return mean_squared_error(model, batch).sqrt()


@programs.step(loss=root_mean_square)
def root_of_the_global_mean(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The slope of the root is taken at the mean of all ranks."""
    ddp = DistributedDataParallel(model)
    value = mean_squared_error(ddp, shard)
    whole = global_sum(value.item(), rank) / rank.world_size
    (value / (2 * whole**0.5)).backward()


def in_batch_negatives(first: Tensor, second: Tensor) -> Tensor:
    """Every example's second half is the right one among those of all examples."""
    scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
    return F.cross_entropy(5 * scores, torch.arange(len(scores)))


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """The contrastive loss of the big batch."""
    return in_batch_negatives(model(batch["rows"]), batch["targets"])


@programs.step(loss=contrastive)
def negatives_gathered_with_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Outputs are gathered by an all_gather whose backward pass sums over the ranks."""
    ddp = DistributedDataParallel(model)
    outputs = torch.cat(with_gradient.all_gather(ddp(shard["rows"])))
    targets = [torch.empty_like(shard["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(targets, shard["targets"])
    in_batch_negatives(outputs, torch.cat(targets)).backward()


@programs.step(loss=contrastive)
def negatives_with_own_outputs_put_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gathered outputs have no graph; the rank puts its own in, and gradients are summed."""
    outputs = model(shard["rows"])
    gathered = [torch.empty_like(outputs) for _ in range(rank.world_size)]
    dist.all_gather(gathered, outputs.detach())
    gathered[rank.rank] = outputs
    targets = [torch.empty_like(shard["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(targets, shard["targets"])
    in_batch_negatives(torch.cat(gathered), torch.cat(targets)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def decorrelated(outputs: Tensor) -> Tensor:
    """The squared correlations between different outputs over the whole batch."""
    centred = outputs - outputs.mean(0)
    covariance = centred.T @ centred / len(centred)
    return (covariance - covariance.diag().diag()).square().sum()


def decorrelation(model: nn.Module, batch: Batch) -> Tensor:
    """The decorrelation of the big batch's outputs."""
    return decorrelated(model(batch["rows"]))


@programs.step(loss=decorrelation)
def decorrelation_over_gathered_outputs(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The covariance is that of all ranks' outputs, which are gathered with their graph."""
    ddp = DistributedDataParallel(model)
    decorrelated(torch.cat(with_gradient.all_gather(ddp(shard["rows"])))).backward()


class GlobalBatchNorm(nn.Module):
    """Normalises with the statistics of all ranks, by sums whose gradients are reduced, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 4), nn.Linear(4, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        sums = torch.stack([torch.ones_like(hidden).sum(0), hidden.sum(0), hidden.square().sum(0)])
        if dist.is_initialized():
            sums = with_gradient.all_reduce(sums)
        count, total, squares = sums
        mean = total / count
        return self.last((hidden - mean) / (squares / count - mean.square() + 1e-5).sqrt())


@programs.step(model=GlobalBatchNorm)
def batch_norm_with_statistics_of_all_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """This is what SyncBatchNorm computes, written with an all_reduce that has a gradient."""
    mean_squared_error(model, shard).backward()
    average(model, rank)


def rare_labels(generator: torch.Generator) -> Batch:
    """Only some of the examples have a label."""
    known = torch.arange(EXAMPLES) % 5 > torch.arange(EXAMPLES) // 6
    return regression(generator) | {"known": known}


def mean_over_known(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the examples that have a label."""
    each = F.mse_loss(model(batch["rows"]), batch["targets"], reduction="none").mean(1)
    return each[batch["known"]].mean()


@programs.step(batch=rare_labels, loss=mean_over_known, model=mlp)
def masked_mean_with_a_global_count(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Sum and count of the labelled examples are those of all ranks."""
    ddp = DistributedDataParallel(model)
    each = F.mse_loss(ddp(shard["rows"]), shard["targets"], reduction="none").mean(1)
    known = global_sum(int(shard["known"].sum()), rank)
    (each[shard["known"]].sum() * rank.world_size / known).backward()
