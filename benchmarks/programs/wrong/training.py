"""Wrong training loops. Each is run with several wrappers, optimizers and settings.

The settings are drawn, the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.programs import wrong_loops as loops
from benchmarks.programs import wrong_reductions as reductions
from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    LanguageModel,
    mean_squared_error,
    texts,
    token_mean,
)
from benchmarks.programs.optimizers import CLIPS, OPTIMIZERS, SCHEDULES
from benchmarks.programs.program import Programs, spelled
from benchmarks.programs.training_loop import Loop, Prepared, Setting, Whole, fields_of
from benchmarks.programs.wrappers import WRAPPERS

programs = Programs("training", right=False)

ANY_WRAPPER = ("ddp", "find_unused", "bucket_views", "ddp_of_compiled", "zero", "by_hand")
DDP = ("ddp", "find_unused", "bucket_views")
BY_HAND = ("by_hand",)

ANY_OPTIMIZER = tuple(OPTIMIZERS)
SHOWS_FACTORS = ("plain_sgd", "momentum", "nesterov", "dampened")
"""Optimizers whose update shows a constant factor on all gradients; Adam and its relatives do not.
"""


@dataclass(frozen=True)
class Wrong:
    """A wrong loop, the causes any of which names it rightly, and the settings that it may have."""

    loop: type[Loop]
    causes: tuple[str, ...]
    wrappers: tuple[str, ...] = ANY_WRAPPER
    optimizers: tuple[str, ...] = ANY_OPTIMIZER
    clips: tuple[str, ...] = ("no clipping",)
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    micro: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (1, 3)
    layouts: tuple[str, ...] = ("1x2", "1x3", "2x2")
    times: int = 3
    setting: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)


FACTOR: dict[str, Any] = {"optimizers": SHOWS_FACTORS}
CLIPPED: dict[str, Any] = {"clips": ("clipped to a norm",)}

WRONG = (
    Wrong(loops.DropsTheLastExample, ("examples_dropped",), times=5),
    Wrong(loops.DropsOnOneRank, ("examples_dropped",)),
    Wrong(loops.Overlaps, ("shares_overlap",), case={"shards": "own"}, micro=(1,)),
    Wrong(loops.ShufflesApart, ("ranks_shuffle_apart",), case={"shards": "own"}),
    Wrong(loops.SumsLosses, ("local_loss_summed",), **FACTOR),
    Wrong(loops.TimesWorldSize, ("sum_not_mean",), **FACTOR, times=4),
    Wrong(loops.DividesByWorldSize, ("averaged_twice",), **FACTOR, times=4),
    Wrong(loops.ForgetsToUnscale, ("gradient_scaled_not_unscaled",), **FACTOR),
    Wrong(loops.DoesNotDivide, ("accumulation_not_divided",), **FACTOR, micro=(2,), times=4),
    Wrong(loops.ClearsInside, ("only_last_micro_batch",), micro=(2,), times=4),
    Wrong(loops.NeverClears, ("stale_gradient_added",), steps=(3,), times=5),
    Wrong(loops.NeverSynchronises, ("no_sync_left_on",), wrappers=DDP, times=4),
    Wrong(
        loops.SynchronisesFirst,
        ("accumulation_boundary_off_by_one",),
        wrappers=DDP,
        micro=(2,),
    ),
    Wrong(loops.CallsTheBareModel, ("raw_module_called",), wrappers=(*DDP, "zero"), times=4),
    Wrong(reductions.ReducesNothing, ("no_all_reduce",), wrappers=BY_HAND),
    Wrong(reductions.LeavesOutAParameter, ("parameter_not_reduced",), wrappers=BY_HAND),
    Wrong(reductions.SumsOverRanks, ("sum_not_mean",), wrappers=BY_HAND, **FACTOR),
    Wrong(reductions.SumsTwice, ("reduced_more_than_once",), wrappers=BY_HAND, **FACTOR),
    Wrong(reductions.DividesByEight, ("divided_by_wrong_number",), wrappers=BY_HAND, **FACTOR),
    Wrong(
        reductions.DividesByRanksOfANode,
        ("divided_by_local_world_size",),
        wrappers=BY_HAND,
        layouts=("2x2",),
        **FACTOR,
    ),
    Wrong(
        reductions.ReducesInsideNodes,
        ("nodes_not_reduced", "reduced_in_wrong_group"),
        wrappers=BY_HAND,
        layouts=("2x2",),
    ),
    Wrong(reductions.LeavesOutARank, ("rank_left_out",), wrappers=BY_HAND),
    Wrong(reductions.ReducesACopy, ("reduced_buffer_not_used",), wrappers=BY_HAND),
    Wrong(reductions.ReducesParameters, ("parameters_reduced_not_gradients",), wrappers=BY_HAND),
    Wrong(reductions.ReducesInBfloat16, ("low_precision_reduce",), wrappers=BY_HAND),
    Wrong(reductions.AddsAPenaltyLater, ("backward_after_reduction",), wrappers=BY_HAND),
    Wrong(reductions.ClipsBeforeReducing, ("clipped_before_reduce",), wrappers=BY_HAND, **CLIPPED),
    Wrong(
        loops.ClipsEveryMicroBatch,
        ("clipped_per_micro_batch",),
        wrappers=("static_graph",),
        micro=(2,),
        **CLIPPED,
    ),
    Wrong(loops.ClipsEachParameter, ("clipped_per_parameter",), **CLIPPED),
    Wrong(loops.StartsApart, ("weights_differ_between_ranks",), wrappers=BY_HAND),
    Wrong(loops.NeverSteps, ("no_optimizer_step",), schedules=("a constant rate",)),
    Wrong(loops.RaisesTheRate, (), schedules=("a constant rate",)),
    Wrong(loops.ForgetsTheSchedule, (), schedules=("a rate that falls in steps",), steps=(3,)),
    Wrong(loops.ShrinksWeights, (), schedules=("a constant rate",)),
)


def batch_norm() -> nn.Module:
    """A batch norm between two linear layers."""
    return nn.Sequential(
        nn.Linear(ROW, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    )


def summed_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum over the examples of their mean squared errors."""
    return mean_squared_error(model, batch) * len(batch["rows"])


def padded_texts(count: int) -> Callable[[torch.Generator], Batch]:
    """The texts of one step."""
    return texts


class OwnTokenMeans(Loop):
    """Every rank's loss is the mean over its own tokens, of which the ranks have unequally many."""


class SummedLoss(Loop):
    """The loss is a sum over examples, and DDP averages it."""


class UnevenShards(Loop):
    """The ranks have different numbers of examples, and their means count equally."""


class LocalBatchNorm(Loop):
    """Batch norm takes its statistics of the rank's own examples."""


ONE_BY_ONE: dict[str, Any] = {"micro": (1,), "steps": (1,)}

WITHOUT_A_WRONG_LINE = (
    Wrong(
        OwnTokenMeans,
        ("token_counts_weighted_equally",),
        setting={"model": LanguageModel, "loss": token_mean, "batch": padded_texts},
        **ONE_BY_ONE,
    ),
    Wrong(
        SummedLoss,
        ("mean_not_sum",),
        setting={"loss": summed_error},
        micro=(1,),
        **FACTOR,
    ),
    Wrong(
        UnevenShards,
        ("uneven_shards_weighted_equally",),
        layouts=("1x2",),
        case={"shards": "8+16"},
        **ONE_BY_ONE,
    ),
    Wrong(LocalBatchNorm, ("batch_norm_local_statistics",), setting={"model": batch_norm}),
)


def add_all() -> None:
    """Add the programs of each wrong loop."""
    draw = random.Random(0)
    for wrong in WRONG + WITHOUT_A_WRONG_LINE:
        for number in range(1, wrong.times + 1):
            _add(wrong, number, draw)


def _add(wrong: Wrong, number: int, draw: random.Random) -> None:
    wrapper, optimizer = draw.choice(wrong.wrappers), draw.choice(wrong.optimizers)
    clip, schedule = draw.choice(wrong.clips), draw.choice(wrong.schedules)
    steps, micro = draw.choice(wrong.steps), draw.choice(wrong.micro)
    setting = Setting(
        optimizer=OPTIMIZERS[optimizer],
        wrapper=WRAPPERS[wrapper],
        clip=CLIPS[clip],
        schedule=SCHEDULES[schedule],
        steps=steps,
        micro=micro,
    )
    setting = replace(setting, **wrong.setting)
    whole = draw.choice((True, False))
    programs.add(
        f"{spelled(wrong.loop.__name__)}_{number}",
        f"{wrong.loop.__doc__} {wrapper}; {optimizer}; {clip}; {schedule}; {micro} micro-batches "
        f"of each rank; {steps} steps; {'called once' if whole else 'prepared'}.",
        step=Whole(setting, wrong.loop) if whole else Prepared(setting, wrong.loop),
        causes=wrong.causes,
        layout=draw.choice(wrong.layouts),
        dtype=draw.choice((torch.float64, torch.float64, torch.float32)),
        **wrong.case,
        **fields_of(setting),
    )


add_all()
