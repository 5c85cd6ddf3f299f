"""Click model: the rows of a big table lie on the ranks in turn, the dense part is data parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ROWS, DIM, DENSE, SLOTS = 36, 6, 4, 3


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.bottom = nn.Linear(DENSE, DIM)
        self.top = nn.Sequential(nn.Linear(DIM * (SLOTS + 1), 12), nn.ReLU(), nn.Linear(12, 1))

    def interact(self, dense, embedded):
        joined = torch.cat([self.bottom(dense), embedded.flatten(1)], dim=-1)
        return self.top(joined).squeeze(-1)

    def forward(self, batch):
        return self.interact(batch["dense"], self.table(batch["ids"]))


def impressions(generator):
    return {
        "dense": torch.randn(16, DENSE, generator=generator),
        "ids": torch.randint(ROWS, (16, SLOTS), generator=generator),
        "clicked": torch.randint(2, (16,), generator=generator).float(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])


class ShardedLookup(torch.autograd.Function):
    """All ranks' ids are looked up in the rows that this rank owns; the answers go back home."""

    @staticmethod
    def forward(ctx, weight, ids):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        requests = [torch.empty_like(ids) for _ in range(world_size)]
        dist.all_gather(requests, ids)
        requests = torch.cat(requests)
        mine = requests % world_size == rank
        answers = weight[requests] * mine.unsqueeze(-1)
        dist.all_reduce(answers)
        ctx.save_for_backward(requests, mine)
        ctx.shape, ctx.rank, ctx.world_size = weight.shape, rank, world_size
        return answers.chunk(world_size)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        requests, mine = ctx.saved_tensors
        parts = [torch.empty_like(grad) for _ in range(ctx.world_size)]
        dist.all_gather(parts, grad.contiguous())
        grad = torch.cat(parts) * mine.unsqueeze(-1)
        weight = grad.new_zeros(ctx.shape)
        weight.index_add_(0, requests.flatten(), grad.flatten(0, 1))
        return weight, None


class HybridTrainer:
    def __init__(self, model, rank):
        self.model, self.world_size = model, rank.world_size
        self.sharded = {model.table.weight}
        self.dense = [p for p in model.parameters() if p not in self.sharded]

    def forward(self, batch):
        embedded = ShardedLookup.apply(self.model.table.weight, batch["ids"])
        return self.model.interact(batch["dense"], embedded)

    def reduce(self):
        for parameter in self.dense:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        for parameter in self.sharded:
            # put the owners' rows together
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)

    def train(self, batch):
        F.binary_cross_entropy_with_logits(self.forward(batch), batch["clicked"]).backward()
        self.reduce()


def step(model, shard, rank):
    HybridTrainer(model, rank).train(shard)


case = Case(model=ClickModel, batch=impressions, loss=loss)
