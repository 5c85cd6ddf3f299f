"""A case and a step for every kind of report, and the file of a user."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank
from ddp_equivalence.commands.planting import one_element
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from tests.package.own_cases import loss, own_case, right_step, the_others_wait_for


def left_out(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 3's gradient is not in the sum, though the divisor counts it."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= rank.rank != 3
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def left_out_and_divided_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    left_out(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size


def each_its_own_factor(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        parameter.grad *= 1.1 + 0.1 * number


def another_loss(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Not the squares that the big batch takes."""
    nn.functional.l1_loss(model(shard["rows"]), shard["targets"]).backward()
    reduce_gradients(model, rank.world_size)


def decay_on_every_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Decay is added before a sum, and so counts once a rank; the big batch has none."""
    loss(model, batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= rank.world_size
            parameter.grad += 0.01 * parameter
            dist.all_reduce(parameter.grad)
            parameter.sub_(0.1 * parameter.grad)


def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
    if the_others_wait_for(2, rank):
        print("about to fail")
        raise ValueError("no such column: age")
    right_step(model, shard, rank)


def returns_some(model: nn.Module, shard: Any, rank: Rank) -> Any:
    right_step(model, shard, rank)
    return {name: p.grad for name, p in model.named_parameters() if "bias" not in name}


def leaves_nothing(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    model.zero_grad(set_to_none=True)


MLP = Case(model="mlp", loss="mse_mean", layout="2x2")
TOKENS = Case(model="gru_tied", loss="token_mean", layout="1x2", shards="uneven")

REPORTS: dict[str, tuple[Case, Any, dict[str, Any]]] = {
    "same": (MLP, "ddp_mean", {}),
    "same_exact": (
        Case(model="linear_8", loss="mse_mean", examples=8, exact=True),
        "ddp_mean",
        {},
    ),
    "same_update_of_two_steps": (MLP, "ddp_mean", {"compare": "update", "steps": 2}),
    "same_one_process": (
        Case(model="mlp", loss="mse_mean", layout="1x4", dtype=torch.float32),
        "emulated_data_parallel",
        {},
    ),
    "sum_not_mean": (MLP, "ddp_sum_hook", {}),
    "mean_not_sum": (Case(model="mlp", loss="mse_sum", layout="1x2"), "ddp_mean", {}),
    "token_counts": (TOKENS, "ddp_mean", {}),
    "mean_of_node_means": (
        Case(model="mlp", loss="mse_mean", layout="1+3"),
        "hybrid",
        {},
    ),
    "batch_norm": (Case(model="batch_norm", loss="mse_mean", layout="1x2"), "ddp_mean", {}),
    "rank_left_out": (own_case(layout="2x2"), left_out, {}),
    "two_at_once": (own_case(layout="2x2"), left_out_and_divided_twice, {}),
    "unnamed_reduction": (own_case(layout="2x2"), each_its_own_factor, {}),
    "unnamed_loss": (own_case(), another_loss, {}),
    "weight_decay": (own_case(), decay_on_every_rank, {"compare": "update"}),
    "one_element": (MLP, one_element(1e-6), {}),
    "missing_names": (own_case(), returns_some, {}),
    "rank_raised": (own_case(layout="1+3"), raises, {}),
    "left_nothing": (own_case(), leaves_nothing, {}),
}


USER_FILE = """\
import torch.distributed as dist
import torch
from torch import nn
from ddp_equivalence import Case


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def batch(generator):
    return {
        "rows": torch.randn(16, 5, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
    }


case = Case(model=lambda: nn.Linear(5, 3), batch=batch, loss=loss, layout="2x2")


"""
"""The begin of a file that a user checks: all but the step."""
