"""Mixed-precision style loop with a loss scaler and two micro-batches for an optimizer step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class AudioTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, wave):
        return self.head(F.relu(self.conv(wave)).mean(-1))


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["wave"]), batch["tags"])


def make_batch(generator):
    return {
        "wave": torch.randn(12, 2, 9, generator=generator),
        "tags": torch.randint(0, 2, (12, 3), generator=generator).double(),
    }


case = Case(model=AudioTagger, batch=make_batch, loss=loss, layout="1+2")


class LossScaler:
    def __init__(self, init_scale=2.0**10, backoff=0.5):
        self.scale_value = init_scale
        self.backoff = backoff

    def scale(self, value):
        return value * self.scale_value

    def unscale_(self, params):
        """Takes the scale out of the gradients; returns whether they are finite."""
        finite = True
        for p in params:
            p.grad.div_(self.scale_value)
            finite = finite and bool(p.grad.isfinite().all())
        return finite

    def update(self, finite):
        if not finite:
            self.scale_value *= self.backoff


class Loop:
    def __init__(self, model, accumulate=2):
        self.model = model
        self.params = list(model.parameters())
        self.scaler = LossScaler()
        self.accumulate = accumulate

    def sync(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())

    def run(self, shard):
        finite = True
        waves = shard["wave"].chunk(self.accumulate)
        tags = shard["tags"].chunk(self.accumulate)
        for i in range(self.accumulate):
            value = loss(self.model, {"wave": waves[i], "tags": tags[i]}) / self.accumulate
            self.scaler.scale(value).backward()
            finite = finite and self.scaler.unscale_(self.params)
        self.sync()
        self.scaler.update(finite)


def step(model, shard, rank):
    model.zero_grad()
    Loop(model).run(shard)
