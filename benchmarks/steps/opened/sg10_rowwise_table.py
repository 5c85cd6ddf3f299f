"""Next-item recommendation with a row-wise sharded item table and data-parallel dense layers."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

ITEMS, DIM, PAD = 22, 8, 0


class SequenceRecommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=PAD)
        self.recency = nn.Parameter(torch.linspace(-1, 1, 6))
        self.mlp = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))
        self.scorer = nn.Linear(DIM, 4)

    def forward(self, history, lookup=None):
        x = (lookup or self.items)(history)
        weight = self.recency.masked_fill(history == PAD, float("-inf")).softmax(1)
        pooled = (weight.unsqueeze(-1) * x).sum(1)
        return self.scorer(pooled + self.mlp(pooled))


def histories(generator):
    history = torch.randint(1, ITEMS, (16, 6), generator=generator)
    length = torch.randint(2, 7, (16, 1), generator=generator)
    history = torch.where(torch.arange(6) < length, history, PAD)
    return {"history": history, "category": torch.randint(0, 4, (16,), generator=generator)}


def loss(model, batch):
    return F.cross_entropy(model(batch["history"]), batch["category"])


class SumScatter(torch.autograd.Function):
    """Each rank gets the sum of all ranks' rows for its own examples; the way back hands its gradient to everybody."""

    @staticmethod
    def forward(ctx, partial):
        dist.all_reduce(partial)
        return partial.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class RowWiseTable:
    """Rank r keeps `rows` consecutive rows, the last rank what remains."""

    def __init__(self, table, rank, world):
        self.world, self.padding_idx = world, table.padding_idx
        self.rows = -(-table.num_embeddings // world)
        self.start = rank * self.rows
        self.weight = nn.Parameter(table.weight.detach()[self.start : self.start + self.rows].clone())

    def __call__(self, ids):
        everywhere = [torch.empty_like(ids) for _ in range(self.world)]
        dist.all_gather(everywhere, ids.contiguous())
        local = torch.cat(everywhere) - self.start
        here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.masked_fill(~here, 0), self.weight, padding_idx=self.padding_idx)
        return SumScatter.apply(rows * here.unsqueeze(-1))

    def full_grad(self, num_rows):
        """The table's gradient, averaged like the dense ones, with the rows of all ranks."""
        mine = F.pad(self.weight.grad / self.world, (0, 0, 0, self.rows - len(self.weight)))
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)[:num_rows]


class ShardedEngine:
    def __init__(self, model, rank):
        self.model, self.world = model, rank.world_size
        self.table = RowWiseTable(model.items, rank.rank, rank.world_size)

    def backward(self, batch):
        F.cross_entropy(self.model(batch["history"], self.table), batch["category"]).backward()

    def gradients(self):
        grads = {"items.weight": self.table.full_grad(ITEMS)}
        for name, p in self.model.named_parameters():
            if name not in grads:
                dist.all_reduce(p.grad)
                grads[name] = p.grad / self.world
        return grads


def step(model, shard, rank):
    engine = ShardedEngine(model, rank)
    engine.backward(shard)
    return engine.gradients()


case = Case(model=SequenceRecommender, batch=histories, loss=loss, layout="1x4")
