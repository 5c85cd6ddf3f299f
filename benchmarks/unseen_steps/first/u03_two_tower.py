"""Two-tower retrieval with in-batch negatives from all ranks and a popularity correction.
Every rank scores its own users against the items of all ranks; DDP averages the gradients."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

USERS, ITEMS, DIM = 30, 40, 8
TEMPERATURE = 0.2


class Tower(nn.Module):
    def __init__(self, num_ids, extra):
        super().__init__()
        self.table = nn.Embedding(num_ids, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM + extra, 16), nn.ReLU(), nn.Linear(16, DIM))

    def forward(self, ids, features):
        hidden = self.mlp(torch.cat([self.table(ids), features], dim=-1))
        return F.normalize(hidden, dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(USERS, extra=3)
        self.item = Tower(ITEMS, extra=4)

    def forward(self, batch):
        user = self.user(batch["user_id"], batch["user_feat"])
        item = self.item(batch["item_id"], batch["item_feat"])
        return user, item


def build_model():
    return TwoTower()


def corrected_logits(user, item, log_pop):
    return user @ item.t() / TEMPERATURE - log_pop[None, :]


def loss(model, batch):
    user, item = model(batch)
    logits = corrected_logits(user, item, batch["log_pop"])
    return F.cross_entropy(logits, torch.arange(len(user)))


def make_batch(generator):
    rows = 16
    return {
        "user_id": torch.randint(0, USERS, (rows,), generator=generator),
        "user_feat": torch.randn(rows, 3, generator=generator),
        "item_id": torch.randperm(ITEMS, generator=generator)[:rows],
        "item_feat": torch.randn(rows, 4, generator=generator),
        "log_pop": torch.rand(rows, generator=generator).add(0.1).log(),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class GatherRows(torch.autograd.Function):
    """all_gather along dim 0 which keeps the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.size(0)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=0)

    @staticmethod
    def backward(ctx, grad_output):
        grad = grad_output.contiguous().clone()
        start = dist.get_rank() * ctx.rows
        return grad[start : start + ctx.rows]


def gather_constant(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=0)


def step(model, shard, rank):
    ddp = DDP(model)
    user, item = ddp(shard)
    all_items = GatherRows.apply(item)
    all_log_pop = gather_constant(shard["log_pop"])

    logits = corrected_logits(user, all_items, all_log_pop)
    labels = torch.arange(len(user)) + rank.rank * len(user)
    train_loss = F.cross_entropy(logits, labels)
    train_loss.backward()

    with torch.no_grad():
        hits = (logits.argmax(dim=-1) == labels).sum()
        dist.all_reduce(hits)
    return
