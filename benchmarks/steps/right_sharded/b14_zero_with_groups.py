"""AdamW with sharded states, two groups of parameters, and a learning rate that the loop sets."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS = 3
PER_STEP = 12
PEAK, BETAS, EPS = 0.05, (0.7, 0.9), 1e-3
DECAY = 0.3
NORM = 0.3


def build():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.GroupNorm(1, 5),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def groups(model):
    wide = [one for one in model.parameters() if one.ndim > 1]
    flat = [one for one in model.parameters() if one.ndim <= 1]
    return [
        {"params": wide, "weight_decay": DECAY},
        {"params": flat, "weight_decay": 0.0},
    ]


def learning_rate(step):
    return PEAK * (step + 1) / STEPS


def images(generator):
    return {
        "image": torch.randn(STEPS * PER_STEP, 2, 6, 6, generator=generator),
        "label": torch.randint(4, (STEPS * PER_STEP,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def in_one_process(model):
    """The same in one process: returns what trains one step."""
    optimizer = torch.optim.AdamW(groups(model), lr=PEAK, betas=BETAS, eps=EPS)
    done = 0

    def train(batch):
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done)
        optimizer.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        done += 1

    return train


def norm_of_gradients(parameters):
    # DDP has averaged already, so that every rank finds the norm of the whole gradient.
    return functools.reduce(torch.hypot, [one.grad.norm() for one in parameters])


def step(model, batch, rank):
    # Two different optimizers would do for two groups; one that takes groups is less to keep.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        groups(model),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=PEAK,
        betas=BETAS,
        eps=EPS,
    )
    each = PER_STEP // dist.get_world_size()
    for number in range(STEPS):
        first = number * PER_STEP + rank.rank * each
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number)
        optimizer.zero_grad(set_to_none=False)
        loss(ddp, {name: part[first : first + each] for name, part in batch.items()}).backward()
        total = norm_of_gradients(model.parameters())
        if total > NORM:
            for parameter in model.parameters():
                parameter.grad.mul_(NORM / (total + 1e-6))
        optimizer.step()


case = Case(model=build, batch=images, loss=loss, layout="1x4", shards="own")
options = {"compare": "update", "reference": in_one_process, "steps": STEPS}
