"""Handwritten digits, a small convolutional network, and three ways to train it on four ranks.

ddp-equivalence check examples/digits.py
ddp-equivalence check examples/digits.py:step_with_scaled_loss
ddp-equivalence check examples/digits.py:trainer
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case, Rank

BIG_BATCH = 16  # examples of one step, on all ranks together
STEPS = 3
LEARNING_RATE = 0.1

Batch = tuple[Tensor, Tensor]  # images (examples, 1, 8, 8) from 0 to 1, labels (examples,)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


def some_digits(generator: torch.Generator, count: int = BIG_BATCH) -> Batch:
    digits = load_digits()
    chosen = torch.randperm(len(digits.images), generator=generator)[:count]
    images = torch.from_numpy(digits.images)[chosen].unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target)[chosen]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


case = Case(model=build_model, batch=some_digits, loss=loss, layout="2x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Right: DDP averages the gradients of four means over equally many examples."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def step_with_scaled_loss(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Wrong: the loss is multiplied by the world size, which undoes DDP's division."""
    ddp = DistributedDataParallel(model)
    (rank.world_size * loss(ddp, shard)).backward()


def digits_of_all_steps(generator: torch.Generator) -> Batch:
    return some_digits(generator, count=STEPS * BIG_BATCH)


# "own": every rank receives the digits of all steps, and the rank's sampler takes its part.
training_case = Case(
    model=build_model, batch=digits_of_all_steps, loss=loss, layout="2x2", shards="own"
)


def train(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Right: a whole training loop. The check compares how far it moves the weights.

    Without shuffling, the sampler gives rank r the examples r, r + 4, r + 8, ... The first four of
    every rank are together the first 16 examples, which are the big batch of the first step.
    """
    dataset = TensorDataset(*batch)
    loader = DataLoader(
        dataset,
        batch_size=BIG_BATCH // rank.world_size,
        sampler=DistributedSampler(dataset, rank.world_size, rank.rank, shuffle=False),
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    for shard in loader:
        optimizer.zero_grad()
        loss(ddp, shard).backward()
        optimizer.step()


trainer = (training_case, train, {"compare": "update", "lr": LEARNING_RATE, "steps": STEPS})
