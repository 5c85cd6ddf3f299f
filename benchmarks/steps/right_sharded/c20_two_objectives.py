"""Self-supervised and supervised objective, one backward pass each, on odd-sized sharded layers.

Gradients are reduced once, in the second backward pass. float32 weights are reduced in float64, so
that the order of the ranks does not show.
"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

SIZES = {"features": 7, "width": 9, "classes": 5}  # none of them divides by four
KEEP = 0.7


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, states):
        return states + torch.tanh(self.inner(states))


class Trunk(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.layers = nn.Sequential(Residual(width), Residual(width))
        self.restore = nn.Linear(width, features)
        self.classify = nn.Linear(width, classes)

    def forward(self, rows):
        states = self.layers(self.stem(rows))
        return self.restore(states), self.classify(states)


def build():
    return Trunk(**SIZES)


def make_batch(generator):
    rows = torch.randn(16, SIZES["features"], generator=generator)
    return {
        "rows": rows,
        "kept": torch.rand(rows.shape, generator=generator) < KEEP,
        "classes": torch.randint(0, SIZES["classes"], (16,), generator=generator),
    }


def reconstruction(model, batch):
    restored, _ = model(batch["rows"] * batch["kept"])
    return (restored - batch["rows"]).pow(2).mean()


def classification(model, batch):
    _, logits = model(batch["rows"])
    return nn.functional.cross_entropy(logits, batch["classes"])


def loss(model, batch):
    return reconstruction(model, batch) + classification(model, batch)


def prepare(model):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, CheckpointImpl.NO_REENTRANT),
        check_fn=lambda m: isinstance(m, Residual),
    )
    for layer in (*model.layers, model.restore, model.classify):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch.compile(model, backend="eager")


def step(model, shard, rank):
    compiled = prepare(model)
    objectives = [reconstruction, classification]
    for number, objective in enumerate(objectives, 1):
        last = number == len(objectives)
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        objective(compiled, shard).backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
    }


case = Case(model=build, batch=make_batch, loss=loss, layout="1x4", dtype=torch.float32)
