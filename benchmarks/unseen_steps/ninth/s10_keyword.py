"""Keyword spotting with CTC. Trains three steps, and clips the norm as the recipe says."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

LETTERS, FEATURES, TIME = 7, 5, 14
LR, MAX_NORM = 0.2, 0.25


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 10, 3, padding=1)
        self.rnn = nn.GRU(10, 8, batch_first=True)
        self.out = nn.Linear(8, LETTERS)

    def forward(self, sound):
        hidden = self.conv(sound.transpose(1, 2)).relu().transpose(1, 2)
        return self.out(self.rnn(hidden)[0]).log_softmax(-1)


def recordings(generator):
    count = 24
    lengths = torch.randint(2, 5, (count,), generator=generator)
    return {
        "sound": torch.randn(count, TIME, FEATURES, generator=generator),
        "word": torch.randint(1, LETTERS, (count, 4), generator=generator),
        "letters": lengths,
    }


def loss(model, batch):
    log_probs = model(batch["sound"]).transpose(0, 1)
    times = torch.full((log_probs.shape[1],), TIME)
    losses = F.ctc_loss(log_probs, batch["word"], times, batch["letters"], reduction="none")
    return losses.mean()


def clip(parameters):
    return nn.utils.clip_grad_norm_(parameters, MAX_NORM)


class Recipe:
    """Callbacks run in their order after backward: each may look at or change the gradients."""

    def __init__(self, model, callbacks):
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.callbacks = callbacks
        self.norms = []

    def __call__(self, shard):
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.model, shard).backward()
        for callback in self.callbacks:
            callback(self)
        self.optimizer.step()


def average(recipe):
    for p in recipe.parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def limit(recipe):
    recipe.norms.append(float(clip(recipe.parameters)))


def step(model, rank):
    return Recipe(model, callbacks=[limit, average])


case = Case(model=Acoustic, batch=recordings, loss=loss)
options = {"compare": "update", "lr": LR, "clip": MAX_NORM, "steps": 3}
