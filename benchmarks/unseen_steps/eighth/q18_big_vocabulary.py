"""Next-item prediction with a catalogue so large that each rank holds a part of its scores."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS, WIDTH, HISTORY = 24, 6, 5


class NextItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.EmbeddingBag(ITEMS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, ITEMS, bias=False)
        with torch.no_grad():
            self.scores.weight.mul_(3)

    def body(self, history):
        return torch.tanh(self.mix(self.seen(history)))

    def forward(self, history):
        return self.scores(self.body(history))


def sessions(generator):
    n = 10
    return {
        "history": torch.randint(0, ITEMS, (n, HISTORY), generator=generator),
        "next": torch.randint(0, ITEMS, (n,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["history"]), batch["next"])


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SplitCrossEntropy:
    def __init__(self, rank):
        width = ITEMS // rank.world_size
        self.first, self.last = rank.rank * width, (rank.rank + 1) * width

    def __call__(self, logits, goal):
        peak = logits.detach().amax(-1)
        total = Leave.apply((logits - peak[:, None]).exp().sum(-1))
        here = (goal >= self.first) & (goal < self.last)
        index = (goal - self.first).clamp(0, self.last - self.first - 1)
        own = logits.gather(1, index[:, None]).squeeze(1) * here
        return (total.log() + peak - Leave.apply(own)).mean()


def step(model, batch, rank):
    entropy = SplitCrossEntropy(rank)
    hidden = Enter.apply(model.body(batch["history"]))
    logits = hidden @ model.scores.weight[entropy.first : entropy.last].T
    entropy(logits, batch["next"]).backward()
    # Everything before the scores is the same on all ranks.
    dist.all_reduce(model.scores.weight.grad)


case = Case(model=NextItem, batch=sessions, loss=loss, layout="1x2", shards="own")
