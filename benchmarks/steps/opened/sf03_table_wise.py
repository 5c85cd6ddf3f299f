"""Click prediction: embedding tables live on one rank each, the dense towers are replicated.

Every rank looks the ids of all ranks up in its tables, and an all-to-all brings the rows to the ranks whose examples
they belong to.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TABLES, ROWS, DIM, DENSE = 4, 13, 5, 6


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, DIM))
        self.top = nn.Sequential(nn.Linear(DIM * (TABLES + 1), 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        everything = torch.cat([self.bottom(dense), sparse.flatten(1)], dim=1)
        return self.top(everything).squeeze(1)


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.towers = Towers()

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        rows = [table(ids[:, t]) for t, table in enumerate(self.tables)]
        return self.towers(dense, torch.stack(rows, dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["dense"], batch["ids"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def impressions(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(16, DENSE, generator=generator),
        "ids": torch.randint(ROWS, (16, TABLES), generator=generator),
        "clicked": (torch.rand(16, generator=generator) < 0.4).double(),
    }


class RowsToTheirRanks(torch.autograd.Function):
    """Block r of dim 0 goes to rank r; the gradients take the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        returned = torch.empty_like(gradient)
        dist.all_to_all_single(returned, gradient.contiguous())
        return returned


class ShardedTables:
    """Table t is on rank t % world size."""

    def __init__(self, tables: nn.ModuleList) -> None:
        self.tables, self.world = tables, dist.get_world_size()
        self.mine = range(dist.get_rank(), len(tables), self.world)

    def __call__(self, ids: Tensor) -> Tensor:
        gathered = [torch.empty_like(ids) for _ in range(self.world)]
        dist.all_gather(gathered, ids.contiguous())
        everyone = torch.cat(gathered)
        rows = torch.stack([self.tables[t](everyone[:, t]) for t in self.mine], dim=1)
        arrived = RowsToTheirRanks.apply(rows)  # (source * batch, tables per rank, dim)
        per_source = arrived.view(self.world, len(ids), len(self.mine), DIM)
        # Rank r sent the tables r, r + world, ...: put them in the order of the model.
        return per_source.permute(1, 2, 0, 3).reshape(len(ids), len(self.tables), DIM)

    def gradients(self) -> dict[str, Tensor]:
        """Of all tables, from the ranks that own them."""
        found = {}
        for t, table in enumerate(self.tables):
            gradient = table.weight.grad if t in self.mine else torch.empty_like(table.weight)
            dist.broadcast(gradient, src=t % self.world)
            found[f"tables.{t}.weight"] = gradient
        return found


def step(model, shard, rank):
    sharded, towers = ShardedTables(model.tables), DistributedDataParallel(model.towers)
    logits = towers(shard["dense"], sharded(shard["ids"]))
    F.binary_cross_entropy_with_logits(logits, shard["clicked"]).backward()
    dense = {f"towers.{name}": p.grad for name, p in model.towers.named_parameters()}
    return dense | sharded.gradients()


case = Case(model=Clicks, batch=impressions, loss=loss, layout="1x2")
