"""A mixture of experts, one expert on each rank: tokens travel to their expert and back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, EXPERTS, CLASSES, EXAMPLES = 6, 8, 3, 4, 24


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        return exchange(rows, send, receive)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.receive, ctx.send), None, None


def exchange(rows, send, receive):
    """Give send[r] rows to rank r, and get receive[r] rows from it."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send)
    return received


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MixtureOfExperts(nn.Module):
    expert_parallel = False

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        gate, chosen = self.router(x).softmax(dim=-1).max(dim=-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        run = self.run_on_ranks if self.expert_parallel else self.run_here
        out = torch.empty_like(x)
        out[order] = run(x[order], counts)
        return gate.unsqueeze(-1) * out

    def run_here(self, rows, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])

    def run_on_ranks(self, rows, counts):
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send, receive = counts.tolist(), incoming.tolist()
        arrived = exchange(rows, send, receive)
        done = self.experts[dist.get_rank()](arrived)
        return AllToAll.apply(done, receive, send)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.mixture = MixtureOfExperts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        return self.head(x + self.mixture(x))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "y": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x3")


def average_gradients(model, world_size):
    """An expert has gradients on its own rank only; they come from the tokens of all ranks."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def step(model, shard, rank):
    model.mixture.expert_parallel = True
    loss(model, shard).backward()
    average_gradients(model, rank.world_size)
