"""Right training loops: every wrapper with every optimizer.

What else a loop does (how it clips, schedules, accumulates, in which precision, for how many steps)
is drawn for each pair, the same in every run.
"""

from __future__ import annotations

import random

import torch

from benchmarks.programs.optimizers import CLIPS, OPTIMIZERS, SCHEDULES
from benchmarks.programs.program import Programs
from benchmarks.programs.training_loop import Prepared, Setting, Whole, fields_of
from benchmarks.programs.wrappers import WRAPPERS, Autocast, FlatParameters, StaticGraph

programs = Programs("training", right=True)


def add_all() -> None:
    """Add a program for each pair of a wrapper and an optimizer."""
    draw = random.Random(0)
    for wrapper_name, wrapper in WRAPPERS.items():
        for optimizer_name, optimizer in OPTIMIZERS.items():
            clip, schedule = draw.choice(list(CLIPS)), draw.choice(list(SCHEDULES))
            steps, micro = draw.choice((1, 3)), draw.choice((1, 2))
            dtype = draw.choice((torch.float64, torch.float32))
            whole = draw.choice((True, False))
            lowest = None
            if wrapper is Autocast:
                dtype, lowest = torch.float32, torch.bfloat16
            if wrapper is FlatParameters and clip == "clipped to a norm":
                dtype = torch.float32  # its clip_grad_norm_ refuses float64
            if wrapper is StaticGraph:
                micro = 1  # its no_sync() is not made for static graphs
            setting = Setting(
                optimizer=optimizer,
                wrapper=wrapper,
                clip=CLIPS[clip],
                schedule=SCHEDULES[schedule],
                steps=steps,
                micro=micro,
            )
            step = Whole(setting) if whole else Prepared(setting)
            programs.add(
                f"{wrapper_name}_{optimizer_name}",
                f"{wrapper.__doc__} {optimizer_name}; {clip}; {schedule}; {micro} micro-batches of "
                f"each rank; {steps} steps; {'called once' if whole else 'prepared'}.",
                step=step,
                dtype=dtype,
                rounds_in=lowest,
                is_verified=wrapper is not FlatParameters,
                layout=draw.choice(("1x2", "1x3", "2x2")),
                **fields_of(setting),
            )


add_all()
