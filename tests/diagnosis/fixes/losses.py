"""Losses that divide by another count, clear or scale at the wrong time, or lose a gradient."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows, with_labels
from tests.diagnosis.names.small_case import average, case
from tests.package.own_cases import loss

UNEVEN = case(shards="8+4")


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the labels that are known."""
    return F.cross_entropy(model(batch["rows"]).flatten(0, 1), batch["labels"].flatten())


def summed_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over the labels that are known."""
    outputs = model(batch["rows"]).flatten(0, 1)
    return F.cross_entropy(outputs, batch["labels"].flatten(), reduction="sum")


LABELS = case(loss=of_labels, batch=with_labels)
TOTAL = "12"


@shows(
    "uneven_shards_weighted_equally",
    "divide the sum of the examples' losses by 12, and multiply it by 2 (world size).",
    {
        "loss(ddp, shard)": '(F.mse_loss(ddp(shard["rows"]), shard["targets"], reduction="sum") / '
        "3 / 12 * 2)"
    },
    UNEVEN,
)
def uneven_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


@shows(
    "uneven_shards_weighted_equally",
    "divide the sum of the examples' losses by 12, and add the ranks' gradients up.",
    {
        "loss(model, shard)": '(loss(model, shard) * len(shard["rows"]) / 12)',
        "rank.world_size": "1",
    },
    UNEVEN,
)
def uneven_by_hand(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.world_size)


@shows(
    "uneven_shards_weighted_equally",
    "divide the sum of the examples' losses by 12, and multiply it by 2 (world size).",
    {"F.mse_loss(ddp(rows), targets) / 2": "F.mse_loss(ddp(rows), targets) * len(rows) / 12 * 2"},
)
def uneven_micro_batches(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].split(4), shard["targets"].split(4), strict=True):
        (F.mse_loss(ddp(rows), targets) / 2).backward()


@shows(
    "token_counts_weighted_equally",
    "divide the summed loss by the count of all ranks, and multiply it by 2 (world size).",
    {
        "of_labels(ddp, shard)": "(2 * summed_labels(ddp, shard) / count)",
        "    (2 *": '    count = (shard["labels"] != -100).sum()\n'
        "    dist.all_reduce(count)\n    (2 *",
    },
    LABELS,
)
def labels_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    of_labels(ddp, shard).backward()


@shows(
    "token_counts_weighted_equally",
    "divide the summed loss by the count of all ranks, and add the ranks' gradients up.",
    {
        "    of_labels(model, shard)": '    count = (shard["labels"] != -100).sum()\n'
        "    dist.all_reduce(count)\n    (summed_labels(model, shard) / count)",
        "rank.world_size": "1",
    },
    LABELS,
)
def labels_by_hand(model: Any, shard: Batch, rank: Rank) -> None:
    of_labels(model, shard).backward()
    average(model, rank.world_size)


@shows(
    "token_counts_weighted_equally",
    "divide the summed loss by the count of the whole window on all ranks, and multiply it by"
    " 2 (world size).",
    {
        "(of_labels(ddp, part) / 2)": "(summed_labels(ddp, part) * 2 / count)",
        "    for ": '    count = (shard["labels"] != -100).sum()\n'
        "    dist.all_reduce(count)\n    for ",
    },
    LABELS,
)
def labels_of_micro_batches(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, labels in zip(shard["rows"].chunk(2), shard["labels"].chunk(2), strict=True):
        part = {"rows": rows, "labels": labels}
        (of_labels(ddp, part) / 2).backward()


@shows(
    "token_counts_weighted_equally",
    "divide each micro-batch's summed loss by the count of the whole window.",
    {
        "(of_labels(model, part) / 3)": "(summed_labels(model, part) / count)",
        "    for ": '    count = (shard["labels"] != -100).sum()\n    for ',
    },
    case("1x1", loss=of_labels, batch=with_labels),
)
def labels_of_micro_batches_on_one_rank(model: Any, shard: Batch, rank: Rank) -> None:
    for rows, labels in zip(shard["rows"].chunk(3), shard["labels"].chunk(3), strict=True):
        part = {"rows": rows, "labels": labels}
        (of_labels(model, part) / 3).backward()


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over examples with weights of classes."""
    return F.cross_entropy(
        model(batch["rows"]),
        batch["labels"],
        weight=torch.tensor([1.0, 3.0, 9.0]).to(batch["rows"]),
    )


def of_classes(generator: torch.Generator) -> Batch:
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 2, 2, 1, 2, 0, 2])
    return {"rows": torch.randn(12, 5, generator=generator), "labels": labels}


@shows(
    "token_counts_weighted_equally",
    "divide the summed loss by the sum of the weights of all ranks, and multiply it by 2 "
    "(world size).",
    {
        "weighted(ddp, shard)": "(2 * weighted(ddp, shard) * own / weights)",
        "    (2 *": '    own = torch.tensor([1.0, 3.0, 9.0])[shard["labels"]].sum()\n'
        "    weights = own.clone()\n    dist.all_reduce(weights)\n    (2 *",
    },
    case(loss=weighted, batch=of_classes),
)
def weights_of_classes(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    weighted(ddp, shard).backward()


@shows(
    "mean_of_node_means",
    "weight the 2 nodes by what their losses divide by, not equally.",
    {
        "(loss(model, shard))": '(loss(model, shard) * len(shard["rows"]) / 12)',
        "parameter.grad /= rank.local_world_size": "pass",
        "parameter.grad /= rank.nodes": "pass",
    },
    case("1+3"),
)
def averages_nodes(model: Any, shard: Batch, rank: Rank) -> None:
    inside = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    leaders = dist.new_group([0, 1])
    (loss(model, shard)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node])
        parameter.grad /= rank.local_world_size
        if rank.local_rank == 0:
            dist.all_reduce(parameter.grad, group=leaders)
            parameter.grad /= rank.nodes
        dist.broadcast(parameter.grad, src=rank.node, group=inside[rank.node])


@shows(
    "divided_by_another_count",
    "multiply the loss by 48 / 23; 23 is the right count (the targets that are not -100).",
    {"(summed": "(48 / 23 * summed"},
    LABELS,
)
def divides_by_all_elements(model: Any, shard: Batch, rank: Rank) -> None:
    (summed_labels(model, shard) / shard["labels"].numel()).backward()
    average(model, rank.world_size)


@shows(
    "divided_by_another_count",
    "multiply the loss by 48 / 23; 23 is the right count (the targets that are not -100).",
    {"(summed": "(48 / 23 * summed"},
    LABELS,
)
def divides_by_all_elements_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (summed_labels(ddp, shard) / shard["labels"].numel()).backward()


@shows(
    "divided_by_another_count",
    "multiply the loss by 12 / 23; 23 is the right count (the targets that are not -100).",
    {"(summed": "(12 / 23 * summed"},
    LABELS,
)
def divides_by_rows(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (summed_labels(ddp, shard) / len(shard["rows"])).backward()


@shows(
    "divided_by_another_count",
    "divide by 23 (the targets that are not -100), not by 48.",
    {"/ count": "/ 23"},
    LABELS,
)
def counts_all_elements_of_all_ranks(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    count = torch.as_tensor(shard["labels"].numel())
    dist.all_reduce(count)
    mean = summed_labels(ddp, shard) / count
    (mean * rank.world_size).backward()


@shows(
    "accumulation_not_divided",
    "divide each loss by 3, the number of micro-batches.",
    {"/ len(rows)": "/ len(rows) / 3"},
    case(),
)
def divides_micro_batches_by_their_rows(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        ((ddp(rows) - targets).square().mean(1).sum() / len(rows)).backward()


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 18, as the mean does, before backward.",
    {'reduction="sum")': 'reduction="sum") / 18'},
)
def sums_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (F.mse_loss(ddp(shard["rows"]), shard["targets"], reduction="sum")).backward()


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 18, as the mean does, before backward.",
    {'reduction="sum"': 'reduction="mean"'},
)
def sums_by_hand(model: Any, shard: Batch, rank: Rank) -> None:
    F.mse_loss(model(shard["rows"]), shard["targets"], reduction="sum").backward()
    average(model, rank.world_size)


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 6 before backward.",
    {'reduction="sum") / 3': 'reduction="sum") / 3 / 6'},
)
def sums_micro_batches(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        (F.mse_loss(ddp(rows), targets, reduction="sum") / 3).backward()


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 18 before backward.",
    {'reduction="sum")': 'reduction="sum") / 18'},
)
def sums_micro_batches_up(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        (F.mse_loss(ddp(rows), targets, reduction="sum")).backward()


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 36 before backward.",
    {'reduction="sum")': 'reduction="sum") / 36'},
)
def sums_on_all_ranks(model: Any, shard: Batch, rank: Rank) -> None:
    (F.mse_loss(model(shard["rows"]), shard["targets"], reduction="sum")).backward()
    average(model, 1)


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 11.5 before backward.",
    {"summed_labels(ddp, shard)": "(summed_labels(ddp, shard) / 11.5)"},
    LABELS,
)
def sums_labels(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    summed_labels(ddp, shard).backward()


@shows(
    "local_loss_summed",
    "the loss is a sum: divide it by 18 before backward.",
    {'reduction="sum")': 'reduction="sum") / 18'},
    UNEVEN,
)
def sums_uneven_shards(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (F.mse_loss(ddp(shard["rows"]), shard["targets"], reduction="sum")).backward()


def matching(outputs: Tensor) -> Tensor:
    """Compares each output with all others."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
    return matching(model(batch["rows"]))


PAIRS = case(loss=of_pairs)


@shows(
    "gather_without_gradient",
    "use a collective of torch.distributed.nn.functional.",
    {
        "    parts = [torch.zeros_like(own) for _ in range(rank.world_size)]\n"
        "    dist.all_gather(parts, own)\n"
        "    parts[rank.rank] = own\n": "    parts = collectives.all_gather(own)\n"
    },
    PAIRS,
)
def gathers_and_puts_its_own_back(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    own = ddp(shard["rows"])
    parts = [torch.zeros_like(own) for _ in range(rank.world_size)]
    dist.all_gather(parts, own)
    parts[rank.rank] = own
    matching(torch.cat(list(parts))).backward()


@shows(
    "gather_without_gradient",
    "use a collective of torch.distributed.nn.functional.",
    {
        "    everybody = [torch.zeros_like(own) for _ in range(rank.world_size)]\n"
        "    dist.all_gather(everybody, "
        "own.detach())\n": "    everybody = collectives.all_gather(own)\n"
    },
    PAIRS,
)
def compares_with_what_has_no_gradient(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    own = ddp(shard["rows"])
    everybody = [torch.zeros_like(own) for _ in range(rank.world_size)]
    dist.all_gather(everybody, own.detach())
    labels = torch.arange(len(own)) + len(own) * rank.rank
    F.cross_entropy(own @ torch.cat(list(everybody)).T, labels).backward()


def root(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch).sqrt()


@shows(
    "gather_without_gradient",
    "use a collective of torch.distributed.nn.functional.",
    {
        "    total = value.detach().clone()\n    dist.all_reduce(total)\n": "    total = "
        "collectives.all_reduce(value)\n",
        "    total = total + (value - value.detach())\n": "",
    },
    case(loss=root),
)
def sums_the_statistic(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    total = value.detach().clone()
    dist.all_reduce(total)
    total = total + (value - value.detach())
    (total / rank.world_size).sqrt().backward()


@shows(
    "statistic_not_additive",
    "gather what the statistic is taken of from all ranks, with its gradient, or average the "
    "mean inside it.",
    {"value = loss(ddp, shard)": "value = collectives.all_reduce(loss(ddp, shard)) / 2"},
    case(loss=root),
)
def takes_the_root_of_its_own_mean(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    value.sqrt().backward()


@shows(
    "contrastive_local_negatives",
    "none is needed; compare all ranks' outputs, gathered with their gradient.",
    {"(own)": "(torch.cat(list(collectives.all_gather(own))))"},
    PAIRS,
)
def compares_its_own_rows(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    own = ddp(shard["rows"])
    matching(own).backward()


# Windows of several micro-batches.


@shows(
    "accumulation_not_divided",
    "divide each loss by 3, the number of micro-batches.",
    {"F.mse_loss(ddp(rows), targets)": "(F.mse_loss(ddp(rows), targets) / 3)"},
)
def adds_micro_batches_up(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        F.mse_loss(ddp(rows), targets).backward()


@shows(
    "accumulation_not_divided",
    "divide each loss by 3, the number of micro-batches.",
    {"value.backward()": "(value / 3).backward()"},
)
def adds_micro_batches_up_by_hand(model: Any, shard: Batch, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        value = F.mse_loss(model(rows), targets)
        value.backward()
    average(model, rank.world_size)


@shows(
    "accumulation_not_divided",
    "divide each loss by 2, the number of micro-batches.",
    {"loss(ddp, part)": "(loss(ddp, part) / 2)"},
    case("1x3"),
)
def adds_micro_batches_up_in_no_sync(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(2):
        part = {name: leaf[number::2] for name, leaf in shard.items()}
        with nullcontext() if number == 1 else ddp.no_sync():
            loss(ddp, part).backward()


@shows(
    "last_window_divided_by_full",
    "divide by the number of micro-batches in this window, not by 4.",
    {"window = 4": "window = 3"},
)
def divides_by_the_full_window(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    window = 4
    for rows, targets in zip(shard["rows"].split(2), shard["targets"].split(2), strict=True):
        (F.mse_loss(ddp(rows), targets) / window).backward()


@shows(
    "last_window_divided_by_full",
    "divide by the number of micro-batches in this window, not by 4.",
    {"parameter.grad /= 8": "parameter.grad /= 6"},
)
def divides_gradients_by_the_full_window(model: Any, shard: Batch, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].split(2), shard["targets"].split(2), strict=True):
        F.mse_loss(model(rows), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= 8


@shows(
    "only_last_micro_batch",
    "call backward for all micro-batches, and clear gradients only before the first.",
    {"        model.zero_grad()\n": "", "    for": "    model.zero_grad()\n    for"},
)
def clears_in_the_loop(model: Any, shard: Batch, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True):
        model.zero_grad()
        (F.mse_loss(model(rows), targets) / 3).backward()
    average(model, rank.world_size)


@shows(
    "only_last_micro_batch",
    "call backward for all micro-batches, and clear gradients only before the first.",
    {"            ddp.zero_grad()\n": "", "    for": "    ddp.zero_grad()\n    for"},
)
def clears_before_each_micro_batch_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(2):
        part = {name: leaf[number::2] for name, leaf in shard.items()}
        with nullcontext() if number == 1 else ddp.no_sync():
            ddp.zero_grad()
            (loss(ddp, part) / 2).backward()


@shows(
    "accumulation_boundary_off_by_one",
    "reduce once, after the last micro-batch, and clear gradients nowhere in between.",
    {"if number == 1 else": "if number == 2 else"},
)
def syncs_too_early(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(3):
        part = {name: leaf[number::3] for name, leaf in shard.items()}
        with nullcontext() if number == 1 else ddp.no_sync():
            (loss(ddp, part) / 3).backward()


@shows(
    "accumulation_boundary_off_by_one",
    "reduce once, after the last micro-batch, and clear gradients nowhere in between.",
    {"if number == 1:": "if number == 2:"},
)
def reduces_too_early(model: Any, shard: Batch, rank: Rank) -> None:
    for number in range(3):
        part = {name: leaf[number::3] for name, leaf in shard.items()}
        (loss(model, part) / 3).backward()
        if number == 1:
            average(model, rank.world_size)


@shows(
    "no_sync_left_on",
    "run the last forward pass of a step outside no_sync.",
    {"if number == 3 else": "if number == 2 else"},
)
def never_syncs(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(3):
        part = {name: leaf[number::3] for name, leaf in shard.items()}
        with nullcontext() if number == 3 else ddp.no_sync():
            (loss(ddp, part) / 3).backward()


@shows(
    "no_sync_left_on",
    "set require_backward_grad_sync=True before the last forward pass of a step.",
    {"ddp.require_backward_grad_sync = False": "ddp.require_backward_grad_sync = True"},
)
def switches_sync_off(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.require_backward_grad_sync = False
    loss(ddp, shard).backward()


@shows(
    "no_sync_left_on",
    "run the last forward pass of a step outside no_sync.",
    {
        "    with ddp.no_sync():\n        value = loss(ddp, shard)\n": "    value = loss(ddp, "
        "shard)\n"
    },
)
def goes_forward_in_no_sync(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        value = loss(ddp, shard)
    value.backward()


def with_outputs(model: nn.Module, batch: Batch) -> Tensor:
    penalty: Tensor = model(batch["rows"]).square().mean()
    return loss(model, batch) + 0.1 * penalty


@shows(
    "backward_after_reduction",
    "add the losses and call backward() once, or reduce after the last backward().",
    {"    loss(ddp, shard).backward()\n    (0.1": "    (loss(ddp, shard) + 0.1"},
    case(loss=with_outputs),
)
def a_penalty_comes_later(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    (0.1 * model(shard["rows"]).square().mean()).backward()


@shows(
    "backward_after_reduction",
    "add the losses and call backward() once, or reduce after the last backward().",
    {
        "    average(model, rank.world_size)\n    (0.1": "    (0.1",
        "mean()).backward()": "mean()).backward()\n    average(model, rank.world_size)",
    },
    case(loss=with_outputs),
)
def a_penalty_comes_after_the_sum(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.world_size)
    (0.1 * model(shard["rows"]).square().mean()).backward()


@shows(
    "reduced_before_backward_finished",
    "reduce once after the last backward has returned, and wait for it.",
    {
        "    model[2].bias.register_post_accumulate_grad_hook(reduce)\n": "",
        "shard).backward()": "shard).backward()\n    average(model, rank.world_size)",
    },
)
def reduces_in_the_hook_of_the_first_gradient(model: Any, shard: Batch, rank: Rank) -> None:
    def reduce(_: Tensor) -> None:
        average(model, rank.world_size)

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model[2].bias.register_post_accumulate_grad_hook(reduce)
    loss(model, shard).backward()


@shows(
    "stale_gradient_added",
    "clear the gradients of all parameters (zero_grad) before this backward pass.",
    {"    loss(ddp, shard).backward()": "    model.zero_grad()\n    loss(ddp, shard).backward()"},
)
def warms_up(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, {name: leaf[:2] for name, leaf in shard.items()}).backward()
    loss(ddp, shard).backward()


@shows(
    "stale_gradient_added",
    "clear the gradients of all parameters (zero_grad) before this backward pass.",
    {"number == 0": "True"},
    case(),
    compare="gradients",
    steps=1,
)
def goes_over_its_rows_twice(model: Any, shard: Batch, rank: Rank) -> None:
    for number in range(2):
        if number == 0:
            model.zero_grad()
        loss(model, shard).backward()
    average(model, rank.world_size)


# Clipping and precision.


@shows(
    "clipped_before_reduce",
    "clip after the gradients of all 2 ranks are reduced, not before.",
    {
        "    clip_grad_norm_(model.parameters(), 0.1)\n": "",
        "    average(model, rank.world_size)": "    average(model, rank.world_size)\n"
        "    clip_grad_norm_(model.parameters(), 0.1)",
    },
)
def clips_and_averages(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    average(model, rank.world_size)


@shows(
    "clipped_per_micro_batch",
    "clip once, after the loop over the micro-batches and after the reduction.",
    {"        clip": "    clip"},
)
def clips_each_micro_batch(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(3):
        part = {name: leaf[number::3] for name, leaf in shard.items()}
        with nullcontext() if number == 2 else ddp.no_sync():
            (loss(ddp, part) / 3).backward()
        clip_grad_norm_(model.parameters(), 0.1)


@shows(
    "clipped_per_parameter",
    "call clip_grad_norm_(model.parameters(), max_norm) once: one norm for all parameters.",
    {
        "    for parameter in model.parameters():\n"
        "        clip_grad_norm_(parameter, 0.1)": "    clip_grad_norm_(model.parameters(), 0.1)"
    },
)
def clips_each_parameter(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 0.1)


@shows(
    "clipped_while_scaled",
    "call scaler.unscale_(optimizer) before clip_grad_norm_.",
    {
        "    clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.unscale_(optimizer)": "    scaler.unscale_(optimizer)\n"
        "    clip_grad_norm_(model.parameters(), 1.0)"
    },
)
def clips_while_scaled(model: Any, shard: Batch, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    ddp = DistributedDataParallel(model)
    scaler.scale(loss(ddp, shard)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)


@shows(
    "gradient_scaled_not_unscaled",
    "divide the gradients once by what the loss was multiplied by (scaler.unscale_), or leave "
    "this factor out.",
    {
        "scaler.scale(loss(ddp, shard)).backward()": "scaler.scale(loss(ddp, shard)).backward()\n"
        "    scaler.unscale_(optimizer)"
    },
)
def does_not_unscale(model: Any, shard: Batch, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp = DistributedDataParallel(model)
    scaler.scale(loss(ddp, shard)).backward()
    assert optimizer is not None


@shows(
    "gradient_scaled_not_unscaled",
    "divide the gradients once by what the loss was multiplied by (scaler.unscale_), or leave "
    "this factor out.",
    {
        "    average": "    for parameter in model.parameters():\n"
        "        parameter.grad /= 8\n    average"
    },
)
def multiplies_by_eight(model: Any, shard: Batch, rank: Rank) -> None:
    (loss(model, shard) * 8).backward()
    average(model, rank.world_size)


@shows(
    "scaler_differs_between_ranks",
    "give all 2 ranks one scale: reduce it, or its input, before it is used.",
    {
        "1.0 + rank.rank": "scale.item()",
        "    scale = ": "    scale = torch.tensor(1.0 + rank.rank)\n"
        "    dist.broadcast(scale, src=0)\n    scale = ",
    },
)
def every_rank_has_its_own_scale(model: Any, shard: Batch, rank: Rank) -> None:
    scale = 1.0 + rank.rank
    (loss(model, shard) * scale).backward()
    average(model, rank.world_size)
    for parameter in model.parameters():
        parameter.grad /= scale


@shows(
    "low_precision_reduce",
    "reduce the gradients in float64, their own type.",
    {"parameter.grad.bfloat16()": "parameter.grad.clone()"},
)
def rounds(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        rounded = parameter.grad.bfloat16()
        dist.all_reduce(rounded)
        parameter.grad = rounded.to(parameter.dtype) / rank.world_size


@shows(
    "overflow_in_reduction",
    "reduce the gradients in float64, their own type.",
    {"parameter.grad.half()": "parameter.grad.clone()"},
    case("1x4"),
)
def overflows(model: Any, shard: Batch, rank: Rank) -> None:
    scale = 200_000.0
    (loss(model, shard) * scale).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.half()
        dist.all_reduce(narrow)
        parameter.grad = narrow.to(parameter.dtype) / rank.world_size / scale


# Models.


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))


@shows(
    "dropout_same_on_all_ranks",
    "torch.manual_seed(seed + rank), after the weights are built alike on all ranks.",
    {"(7)": "(7 + rank.rank)"},
    case(model=dropping),
    allow_changes=True,
)
def seeds_all_ranks_alike(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    torch.manual_seed(7)
    loss(ddp, shard).backward()


class Centred(nn.Module):
    """Subtracts a running mean of the rows, which a buffer holds."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, rows: Tensor) -> Any:
        return self.layer(rows - self.mean)


@shows(
    "buffers_differ_between_ranks",
    "reduce mean over all ranks after each change, or broadcast from rank 0.",
    {"    loss(model": "    dist.all_reduce(model.mean)\n    model.mean /= 2\n    loss(model"},
    case(model=Centred),
)
def keeps_a_running_mean(model: Any, shard: Batch, rank: Rank) -> None:
    model.mean += 0.0 * shard["rows"].mean(0) + 0.1 * rank.rank - 0.05
    loss(model, shard).backward()
    average(model, rank.world_size)
