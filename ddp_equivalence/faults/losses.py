"""The ranks' losses count wrongly: by other divisors, or each for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.distributed.nn import functional as collectives
from torch.nn import functional

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import ddp_hook
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.faults.model import of_ddp_as_it_is
from ddp_equivalence.faults.rank_and_node import node_of_every_rank
from ddp_equivalence.strategies.strategy import Task, TrainStep

# The sum over all tokens or elements is divided by the number of examples.


def divide_by_examples(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that divides the gradient of the summed losses of all ranks by all examples."""
    ddp = task.wrap()
    loss = catalogue_loss_of(task.case, needed_by="divided_by_another_count")

    def broken(shard: Any) -> None:
        totals = loss.totals(ddp, ddp(shard["inputs"]), shard)
        (task.rank.world_size * torch.stack(totals).sum()).backward()
        examples = torch.tensor(
            float(count_examples(shard, task.case.batch_dims)), device=task.rank.device
        )
        dist.all_reduce(examples)
        record_firing()
        for parameter in task.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= int(examples)

    return broken


DIVIDED_BY_ANOTHER_COUNT = Fault(
    name="divided_by_another_count",
    sentence="The sum over all tokens or elements is divided by the number of examples.",
    break_step=divide_by_examples,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_global_mean",),
    pairs=(("gru_tied", "token_mean"), ("attention_tied", "token_mean"), ("mlp", "mse_mean")),
    own_step="",
)


# The outputs of other ranks are gathered, and no gradient flows back to them.


@contextmanager
def gather_detached(record_firing: RecordFiring) -> Iterator[None]:
    """``dist.all_gather`` replaces the gather through which gradients flow back."""

    def all_gather(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach(), group=group)
        gathered[dist.get_rank(group)] = tensor
        record_firing()
        return tuple(gathered)

    with patch.object(collectives, "all_gather", all_gather):
        yield


GATHER_WITHOUT_GRADIENT = Fault(
    name="gather_without_gradient",
    sentence="Outputs go through dist.all_gather, so only the rank's own outputs keep their graph.",
    break_torch=gather_detached,
    strategies=("ddp_gathered",),
    pairs=(("mlp", "contrastive"), ("mlp", "mse_mean"), ("gru_tied", "token_mean")),
    own_step="gathering",
    acts_at=("gather",),
)


# Torch's losses return the sum where the caller asks for the mean.


LOSSES = ("mse_loss", "l1_loss", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")


@contextmanager
def sum_losses(record_firing: RecordFiring) -> Iterator[None]:
    """The losses of torch.nn.functional return a sum where the caller asks for the mean."""

    def broken(loss: Callable[..., Any]) -> Callable[..., Any]:
        def total(*arguments: Any, **named: Any) -> Any:
            if named.get("reduction", "mean") == "mean":
                named["reduction"] = "sum"
                record_firing()
            return loss(*arguments, **named)

        return total

    with ExitStack() as stack:
        for name in LOSSES:
            stack.enter_context(patch.object(functional, name, broken(getattr(functional, name))))
        yield


LOCAL_LOSS_SUMMED = Fault(
    name="local_loss_summed",
    sentence="torch.nn.functional's losses take the sum over the rank's examples, not the mean.",
    break_torch=sum_losses,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    acts_at=("loss",),
)


# Gradients are averaged inside each node, and then the nodes' means are averaged.


def average_node_means(bucket: GradBucket) -> Tensor:
    """The mean over nodes of the means over the ranks of each node."""
    values: Tensor = bucket.buffer()
    by_rank = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, values)
    node_of_rank = node_of_every_rank(values.device)
    means = [
        torch.stack(
            [by_rank[rank] for rank, rank_node in enumerate(node_of_rank) if rank_node == node]
        ).mean(0)
        for node in sorted(set(node_of_rank))
    ]
    return torch.stack(means).mean(0)


def why_it_cannot_show(layout: Layout) -> str | None:
    """If all nodes have equally many ranks, the mean of their means is the mean over all ranks."""
    sizes = {len(layout.ranks_on(node)) for node in range(layout.nodes)}
    return "all nodes have equally many ranks" if len(sizes) == 1 else None


MEAN_OF_NODE_MEANS = Fault(
    name="mean_of_node_means",
    sentence="DDP's communication hook averages inside each node and then over the nodes.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_node_means),
    why_it_cannot_show=why_it_cannot_show,
    own_step="on_unequal_nodes",
)


# A root of a mean is given the rank's shard. Nothing has to be broken for that.


STATISTIC_NOT_ADDITIVE = of_ddp_as_it_is(
    name="statistic_not_additive",
    sentence="The loss is the root of the mean squared error of the rank's own shard.",
    pairs=(("mlp", "root_mean_square"),),
)


# Each rank's loss divides by its own number of examples, though shards are uneven.


def divide_by_own_count(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step with DDP and the mean loss over the rank's own examples."""
    ddp = task.wrap()

    def broken(shard: Any) -> None:
        task.loss(ddp, shard).backward()
        record_firing()

    return broken


UNEVEN_SHARDS_WEIGHTED_EQUALLY = Fault(
    name="uneven_shards_weighted_equally",
    sentence="The global mean is replaced by the mean over each rank's own examples.",
    break_step=divide_by_own_count,
    strategies=("ddp_global_mean",),
    needs_unequal_divisors=True,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    shards=("uneven", "one_example"),
    own_step="",
)


# Each rank's loss divides by the rank's own number of tokens or positives, or sum of weights.


TOKEN_COUNTS_WEIGHTED_EQUALLY = Fault(
    name="token_counts_weighted_equally",
    sentence="Each rank's loss divides by its own count of tokens, not by the global count.",
    break_step=divide_by_own_count,
    strategies=("ddp_global_mean",),
    needs_unequal_divisors=True,
    pairs=(
        ("gru_tied", "token_mean"),
        ("attention_tied", "token_mean"),
        ("mlp", "two_normalisers"),
        ("mlp", "label_weighted_mean"),
    ),
    own_step="",
)
