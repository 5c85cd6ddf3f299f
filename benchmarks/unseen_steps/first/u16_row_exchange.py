"""Next-item recommendation from a bag of past items. Dense gradients are all-reduced;
of the item table only the touched rows are exchanged, as pairs of row numbers and row gradients."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

ITEMS, DIM, HISTORY, CLASSES = 30, 8, 5, 7


class BagRecommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.cross = nn.Linear(2 * DIM, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, history):
        rows = self.items(history)
        bag = torch.cat([rows.mean(dim=1), rows[:, -1]], dim=-1)
        return self.out(F.relu(self.cross(bag)))


def build_model():
    return BagRecommender()


def category_loss(model, batch):
    return F.cross_entropy(model(batch["history"]), batch["category"])


def loss(model, batch):
    return category_loss(model, batch)


def make_batch(generator):
    rows = 16
    return {
        "history": torch.randint(0, ITEMS, (rows, HISTORY), generator=generator),
        "category": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def all_gather_list(x, world_size):
    out = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(out, x)
    return out


class RowExchange:
    """Sends (row number, row gradient) pairs of an embedding table, padded to the largest rank."""

    def __init__(self, table, world_size):
        self.table = table
        self.world_size = world_size
        self.sentinel = table.num_embeddings

    def _pad(self, ids, rows):
        width = torch.tensor([len(ids)])
        dist.all_reduce(width, op=dist.ReduceOp.MAX)
        missing = int(width) - len(ids)
        ids = torch.cat([ids, ids.new_full((missing,), self.sentinel)])
        rows = torch.cat([rows, rows.new_zeros(missing, rows.size(1))])
        return ids, rows

    @torch.no_grad()
    def synchronize(self, touched):
        grad = self.table.weight.grad
        ids = touched.unique()
        ids, rows = self._pad(ids, grad[ids])
        all_ids = all_gather_list(ids, self.world_size)
        all_rows = all_gather_list(rows, self.world_size)

        merged = grad.new_zeros(self.sentinel + 1, grad.size(1))
        for rank_ids, rank_rows in zip(all_ids, all_rows):
            merged[rank_ids] = rank_rows / self.world_size
        grad.copy_(merged[: self.sentinel])


@torch.no_grad()
def average_dense(params, world_size):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(world_size)


def step(model, shard, rank):
    exchange = RowExchange(model.items, rank.world_size)
    train_loss = category_loss(model, shard)
    train_loss.backward()
    dense = [p for name, p in model.named_parameters() if not name.startswith("items")]
    average_dense(dense, rank.world_size)
    exchange.synchronize(shard["history"].flatten())
    return
