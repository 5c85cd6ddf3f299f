"""``static_graph=True`` reduces nothing after ``torch.autograd.grad`` of the same outputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Ask for the gradient of the inputs first, as for a penalty."""
    ddp = DistributedDataParallel(model, static_graph=True)
    inputs = batch["inputs"].requires_grad_()
    outputs = ddp(inputs)
    torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    mse_loss(outputs, batch["targets"]).backward()


DEFECT = KnownDefect(
    name="static_graph_grad_before_backward",
    says="with static_graph=True, DDP reduces nothing in the first backward pass if "
    "torch.autograd.grad went through the same outputs before",
    step=step,
    outcome="different",
    words="gradients of some ranks are missing",
    upstream=("https://github.com/pytorch/pytorch/issues/80832",),
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="leave static_graph out",
)
