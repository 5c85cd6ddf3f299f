"""Optimizers, schedules and clipping that people train with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, StepLR

from benchmarks.programs.training_loop import plain_sgd
from benchmarks.programs.wrappers import Clip, Make

OPTIMIZERS: dict[str, Make] = {
    "plain_sgd": plain_sgd,
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": partial(optim.SGD, lr=0.1, momentum=0.8, dampening=0.1),
    "adam": partial(optim.Adam, lr=0.01),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "fused_adamw": partial(optim.AdamW, lr=0.01, fused=True),
    "foreach_adamw": partial(optim.AdamW, lr=0.01, foreach=True),
    "amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=1.0),
}

SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
    "a constant rate": None,
    "a rate that falls in steps": partial(StepLR, step_size=1, gamma=0.5),
    "a cosine": partial(CosineAnnealingLR, T_max=5),
    "a warm-up": partial(LinearLR, start_factor=0.1, total_iters=3),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=5, cycle_momentum=False),
}

CLIPS: dict[str, Clip | None] = {
    "no clipping": None,
    "clipped to a norm": Clip(norm=0.2),
    "clipped by value": Clip(value=0.05),
}
