"""Top-1 mixture of experts, one expert per rank; tokens travel to their expert and back."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

DIM, EXPERTS, TOKENS = 6, 2, 24


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(DIM, 12), nn.SiLU(), nn.Linear(12, DIM))


class SwitchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.out = nn.Linear(DIM, 2)

    def route(self, h):
        gate, choice = self.router(h).softmax(-1).max(-1)
        return gate, choice

    def forward(self, x):
        h = self.stem(x)
        gate, choice = self.route(h)
        mixed = sum(expert(h) * (choice == e)[:, None] for e, expert in enumerate(self.experts))
        return self.out(h + gate[:, None] * mixed)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {"x": torch.randn(TOKENS, DIM, generator=generator), "y": torch.randn(TOKENS, 2, generator=generator)}


def exchange(x, send, receive):
    out = x.new_empty(sum(receive), x.shape[1])
    parts = list(out.split(receive))
    requests = []
    me = dist.get_rank()
    chunks = [c.contiguous() for c in x.split(send)]
    for peer in range(dist.get_world_size()):
        if peer == me:
            parts[me].copy_(chunks[me])
            continue
        if receive[peer]:
            requests.append(dist.irecv(parts[peer], peer))
        if send[peer]:
            requests.append(dist.isend(chunks[peer], peer))
    for request in requests:
        request.wait()
    return out


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.splits = send, receive
        return exchange(x, send, receive)

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.splits
        return exchange(grad, receive, send), None, None


class ExpertParallel:
    def __init__(self, model, rank):
        self.model, self.rank, self.world = model, rank, dist.get_world_size()

    def splits(self, choice):
        counts = torch.bincount(choice, minlength=self.world)
        table = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(table, counts)
        return counts.tolist(), [int(row[self.rank]) for row in table]

    def moe(self, h, choice):
        send, receive = self.splits(choice)
        order = torch.argsort(choice, stable=True)
        arrived = AllToAll.apply(h[order], send, receive)
        returned = AllToAll.apply(self.model.experts[self.rank](arrived), receive, send)
        return returned[order]

    def forward(self, x):
        h = self.model.stem(x)
        gate, choice = self.model.route(h)
        return self.model.out(h + gate[:, None] * self.moe(h, choice))


def step(model, shard, rank):
    parallel = ExpertParallel(model, dist.get_rank())
    F.mse_loss(parallel.forward(shard["x"]), shard["y"]).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= parallel.world


case = Case(model=SwitchModel, batch=make_batch, loss=loss, layout="1x2")
