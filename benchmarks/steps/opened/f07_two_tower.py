"""Two-tower retrieval: sparse item embeddings are exchanged as rows, dense weights as a flat buffer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS = 15
HISTORY = 4
DIM = 6


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        self.user = nn.Sequential(nn.Linear(DIM, 10), nn.Tanh(), nn.Linear(10, DIM))

    def forward(self, history, candidates):
        user = self.user(self.items(history).mean(dim=1))
        return torch.einsum("bd,bcd->bc", user, self.items(candidates))


def retrieval_loss(model, batch):
    scores = model(batch["history"], batch["candidates"])
    return F.cross_entropy(scores, batch["clicked"])


class RowExchange:
    """Sums row gradients over the ranks: all ranks get the rows and indices of all others."""

    def __init__(self, world_size):
        self.world_size = world_size

    def pad_to(self, tensor, rows):
        missing = tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])
        return torch.cat([tensor, missing])

    def gather_rows(self, tensor):
        rows = torch.tensor([len(tensor)])
        counts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(counts, rows)
        longest = int(max(counts))
        parts = [tensor.new_empty(longest, *tensor.shape[1:]) for _ in range(self.world_size)]
        dist.all_gather(parts, self.pad_to(tensor, longest))
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def __call__(self, grad):
        grad = grad.coalesce()
        indices = self.gather_rows(grad.indices()[0])
        values = self.gather_rows(grad.values())
        dense = torch.zeros(grad.shape, dtype=values.dtype)
        dense[indices] += values / self.world_size
        return dense


class FlatExchange:
    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, grads):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world_size
        pieces = flat.split([grad.numel() for grad in grads])
        for grad, piece in zip(grads, pieces, strict=True):
            grad.copy_(piece.view_as(grad))


class RetrievalTrainer:
    def __init__(self, model):
        self.model = model
        self.exchange_rows = RowExchange(dist.get_world_size())
        self.exchange_dense = FlatExchange(dist.get_world_size())

    def synchronize(self):
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.exchange_dense([p.grad for p in parameters if not p.grad.is_sparse])
        for parameter in parameters:
            if parameter.grad.is_sparse:
                parameter.grad = self.exchange_rows(parameter.grad)

    def train_step(self, batch):
        loss = retrieval_loss(self.model, batch)
        loss.backward()
        self.synchronize()
        return loss.item()


def make_batch(generator):
    return {
        "history": torch.randint(ITEMS, (12, HISTORY), generator=generator),
        "candidates": torch.randint(ITEMS, (12, 3), generator=generator),
        "clicked": torch.randint(3, (12,), generator=generator),
    }


case = Case(model=TwoTower, batch=make_batch, loss=retrieval_loss, layout="1x2")


def step(model, shard, rank):
    RetrievalTrainer(model).train_step(shard)
