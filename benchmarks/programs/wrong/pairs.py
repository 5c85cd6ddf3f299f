"""Losses on pairs and groups of examples, of which a rank sees only its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    OUTPUTS,
    Batch,
    ByHand,
    LanguageModel,
    UnderDdp,
    average,
    classes,
    global_sum,
    gradients,
    mean_squared_error,
    texts,
    token_mean,
    token_sum,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("pairs", right=False)


def in_batch_negatives(first: Tensor, second: Tensor) -> Tensor:
    """Every example's second half is the right one among those of all examples."""
    scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
    return F.cross_entropy(5 * scores, torch.arange(len(scores)))


def gathered(values: Tensor, rank: Rank) -> list[Tensor]:
    """The values of all ranks, without a graph."""
    found = [torch.empty_like(values) for _ in range(rank.world_size)]
    dist.all_gather(found, values.detach().contiguous())
    return found


@programs.loss()
def local_negatives(model: nn.Module, batch: Batch) -> Tensor:
    """A contrastive loss whose negatives are the rank's own examples."""
    return in_batch_negatives(model(batch["rows"]), batch["targets"])


@programs.loss()
def local_negatives_in_two_directions(model: nn.Module, batch: Batch) -> Tensor:
    """Rows choose targets and targets choose rows, among those of the rank (CLIP)."""
    outputs, targets = model(batch["rows"]), batch["targets"]
    return in_batch_negatives(outputs, targets) + in_batch_negatives(targets, outputs)


@programs.loss()
def pairwise_sigmoids(model: nn.Module, batch: Batch) -> Tensor:
    """Every pair of a rank is a binary decision (SigLIP); most pairs of the batch are missing."""
    scores = model(batch["rows"]) @ batch["targets"].T
    wanted = torch.eye(len(scores), dtype=scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / len(scores)


@programs.loss(batch=classes)
def supervised_contrast(model: nn.Module, batch: Batch) -> Tensor:
    """Examples of one class attract each other, within the rank."""
    outputs = F.normalize(model(batch["rows"]), dim=1)
    scores = (outputs @ outputs.T).fill_diagonal_(-9)
    same = batch["labels"][:, None] == batch["labels"]
    return -(scores.log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


@programs.loss(batch=classes)
def hardest_triplets(model: nn.Module, batch: Batch) -> Tensor:
    """Positive and negative are the hardest of the rank."""
    outputs = model(batch["rows"])
    distances = (outputs[:, None] - outputs).square().sum(2)
    same = batch["labels"][:, None] == batch["labels"]
    near = distances.masked_fill(same, 1e3).amin(1)
    return F.relu(distances.masked_fill(~same, 0).amax(1) - near + 1).mean()


@programs.loss()
def all_pairs_ranked(model: nn.Module, batch: Batch) -> Tensor:
    """Every pair of examples of a rank shall be in the order of its targets."""
    scores, wanted = model(batch["rows"])[:, 0], batch["targets"][:, 0]
    order = (wanted[:, None] - wanted).sign()
    return F.softplus(-order * (scores[:, None] - scores)).mean()


@programs.loss()
def list_ranked_by_softmax(model: nn.Module, batch: Batch) -> Tensor:
    """The examples of a rank form one list, whose softmax shall be that of the targets."""
    scores, wanted = model(batch["rows"])[:, 0], batch["targets"][:, 0]
    return -(wanted.softmax(0) * scores.log_softmax(0)).sum()


@programs.loss()
def decorrelated_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """The correlations are those between the outputs of the rank (Barlow twins, VICReg)."""
    outputs = model(batch["rows"])
    centred = outputs - outputs.mean(0)
    covariance = centred.T @ centred / len(centred)
    return (covariance - torch.eye(OUTPUTS, dtype=outputs.dtype)).square().sum()


@programs.loss()
def spread_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """A hinge on the standard deviation over the rank's examples."""
    return F.relu(2 - model(batch["rows"]).std(0)).mean()


@programs.loss()
def distance_of_distributions(model: nn.Module, batch: Batch) -> Tensor:
    """The kernel distance between outputs and targets, over pairs of the rank's examples."""
    outputs, targets = model(batch["rows"]), batch["targets"]
    inner = torch.exp(-torch.cdist(outputs, outputs).square().add(1e-9)).mean()
    return inner - 2 * torch.exp(-torch.cdist(outputs, targets).square()).mean()


@programs.loss()
def concordance_with_the_targets(model: nn.Module, batch: Batch) -> Tensor:
    """The cosine between all outputs and all targets of the rank."""
    outputs, targets = model(batch["rows"]).flatten(), batch["targets"].flatten()
    return 1 - F.cosine_similarity(outputs, targets, dim=0)


@programs.loss()
def load_balancing(model: nn.Module, batch: Batch) -> Tensor:
    """The share of an expert times its mean gate, both over the rank's examples."""
    gates = model(batch["rows"]).softmax(1)
    share = F.one_hot(gates.argmax(1), OUTPUTS).to(gates.dtype).mean(0)
    return F.mse_loss(gates, batch["targets"]) + (share * gates.mean(0)).sum()


@programs.loss()
def advantages_normalised(model: nn.Module, batch: Batch) -> Tensor:
    """Rewards are standardised over the rank's examples before they weigh the score."""
    rewards = batch["targets"][:, 1]
    advantages = (rewards - rewards.mean()) / rewards.std()
    return -(advantages * model(batch["rows"])[:, 0].tanh()).mean()


@programs.loss()
def shuffled_within_the_rank(model: nn.Module, batch: Batch) -> Tensor:
    """Mixup takes its partner from the rank's own examples."""
    rows, targets = batch["rows"], batch["targets"]
    outputs = model(0.7 * rows + 0.3 * rows.flip(0))
    return F.mse_loss(outputs, 0.7 * targets + 0.3 * targets.flip(0))


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """The contrastive loss of the big batch."""
    return in_batch_negatives(model(batch["rows"]), batch["targets"])


@programs.step(loss=contrastive)
def gathered_without_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    """all_gather has no gradient; the rank's own outputs are put in, and DDP divides by W."""
    ddp = DistributedDataParallel(model)
    outputs = ddp(shard["rows"])
    everywhere = gathered(outputs, rank)
    everywhere[rank.rank] = outputs
    in_batch_negatives(
        torch.cat(everywhere), torch.cat(gathered(shard["targets"], rank))
    ).backward()


@programs.step(loss=contrastive)
def own_rows_against_all_targets(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Targets are gathered, but the labels do not move along with the rank."""
    ddp = DistributedDataParallel(model)
    outputs = F.normalize(ddp(shard["rows"]), dim=1)
    targets = F.normalize(torch.cat(gathered(shard["targets"], rank)), dim=1)
    F.cross_entropy(5 * outputs @ targets.T, torch.arange(len(outputs))).backward()


@programs.step(loss=contrastive)
def gathered_in_another_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank puts its own targets first and its outputs where its number says."""
    outputs = model(shard["rows"])
    everywhere = gathered(outputs, rank)
    everywhere[rank.rank] = outputs
    targets = gathered(shard["targets"], rank)
    targets.insert(0, targets.pop(rank.rank))
    in_batch_negatives(torch.cat(everywhere), torch.cat(targets)).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def global_count_without_world_size(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum is divided by the tokens of all ranks, and then DDP divides by W once more."""
    ddp = DistributedDataParallel(model)
    tokens = global_sum(int((shard["targets"] >= 0).sum()), rank)
    (token_sum(ddp, shard) / tokens).backward()


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def global_count_of_all_positions(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The count of all ranks has the padded positions, too."""
    ddp = DistributedDataParallel(model)
    tokens = global_sum(shard["targets"].numel(), rank)
    (token_sum(ddp, shard) * rank.world_size / tokens).backward()


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def averaged_count_rounded(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The mean number of tokens of a rank is cut to a whole number of tens."""
    ddp = DistributedDataParallel(model)
    tokens = global_sum(int((shard["targets"] >= 0).sum()), rank) / rank.world_size
    (token_sum(ddp, shard) / (10 * int(tokens / 10))).backward()


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def loss_value_averaged_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is all-reduced for the log, and its value, but not its gradient, is put right."""
    ddp = DistributedDataParallel(model)
    value = token_mean(ddp, shard)
    shown = value.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    (value + (shown - value.detach())).backward()


def penalty(model: nn.Module) -> Tensor:
    """The squared weights."""
    return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error and the squared weights."""
    return mean_squared_error(model, batch) + 0.01 * penalty(model)


@programs.step(loss=penalised)
def penalty_after_a_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Errors are summed and divided rightly, but the penalty is added once on each rank."""
    (mean_squared_error(model, shard) / rank.world_size + 0.01 * penalty(model)).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)


@programs.step(loss=penalised)
def penalty_on_rank_zero(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only rank 0 adds the penalty, and then the average makes it smaller."""
    loss = penalised if rank.rank == 0 else mean_squared_error
    UnderDdp(loss)(model, shard, rank)


def small_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error and a thousandth of a thousandth of the squared weights."""
    return mean_squared_error(model, batch) + 1e-6 * penalty(model)


@programs.loss(step=UnderDdp(mean_squared_error))
def penalty_forgotten(model: nn.Module, batch: Batch) -> Tensor:
    """The step leaves out a penalty whose weight is one millionth."""
    return small_penalty(model, batch)


def sloped(model: nn.Module, batch: Batch, create_graph: bool) -> Tensor:
    """The error and the squared slope of every example."""
    rows = batch["rows"].clone().requires_grad_()
    outputs = model(rows)
    (slope,) = torch.autograd.grad(
        outputs.sum(), rows, create_graph=create_graph, retain_graph=True
    )
    return F.mse_loss(outputs, batch["targets"]) + 0.1 * slope.square().sum(1).mean()


def slope_without_graph(model: nn.Module, batch: Batch) -> Tensor:
    """The penalty on the slope has no gradient here."""
    return sloped(model, batch, create_graph=False)


@programs.loss(step=ByHand(slope_without_graph))
def gradient_penalty_without_graph(model: nn.Module, batch: Batch) -> Tensor:
    """The step forgets create_graph, so that the penalty on the slope has no gradient."""
    return sloped(model, batch, create_graph=True)


@programs.step()
def loss_averaged_without_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rank multiplies its loss by the ratio to the mean loss of all ranks."""
    value = mean_squared_error(model, shard)
    whole = global_sum(value.item(), rank) / rank.world_size
    (value * (whole / value.item())).backward()
    average(model, rank)
