"""Semi-supervised images: a student follows its labels and a slowly moving teacher."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

DECAY = 0.7
PIECES = 2
STEPS = 3
LR = 0.2


def small_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5)
    )


class StudentAndTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = small_net()
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)

    def forward(self, images, others):
        with torch.no_grad():
            goal = self.teacher(others).softmax(-1)
        return self.student(images), self.student(others).softmax(-1), goal


def make_batch(generator):
    n = 8 * STEPS
    return {
        "images": torch.randn(n, 1, 6, 6, generator=generator),
        "others": torch.randn(n, 1, 6, 6, generator=generator),
        "labels": torch.randint(0, 5, (n,), generator=generator),
    }


def loss(model, batch):
    logits, guess, goal = model(batch["images"], batch["others"])
    return F.cross_entropy(logits, batch["labels"]) + 20 * F.mse_loss(guess, goal)


class Ema:
    def __init__(self, module, decay):
        self.pairs = list(zip(module.teacher.parameters(), module.student.parameters()))
        self.decay = decay

    @torch.no_grad()
    def update(self):
        for slow, fast in self.pairs:
            slow.lerp_(fast, 1 - self.decay)


def alone(model):
    """One device, the whole batch at once."""
    optimizer = torch.optim.SGD(model.student.parameters(), lr=LR)
    ema = Ema(model, DECAY)

    def train(batch):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        ema.update()

    return train


class Distributed:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.student.parameters(), lr=LR)
        self.ema = Ema(model, DECAY)

    def pieces(self, shard):
        chunks = {key: value.chunk(PIECES) for key, value in shard.items()}
        return [{key: chunks[key][i] for key in chunks} for i in range(PIECES)]

    def __call__(self, shard):
        self.optimizer.zero_grad()
        for number, piece in enumerate(self.pieces(shard), 1):
            self.ddp.require_backward_grad_sync = number == PIECES
            (loss(self.ddp, piece) / PIECES).backward()
            if number == PIECES:
                self.optimizer.step()
            self.ema.update()


case = Case(model=StudentAndTeacher, batch=make_batch, loss=loss, layout="1x2")
step = Distributed
options = {"compare": "update", "reference": alone, "steps": STEPS}
