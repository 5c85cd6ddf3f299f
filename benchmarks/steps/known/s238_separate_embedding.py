"""A recommender: its embedding is reduced by hand, row by row, and DDP reduces everything else."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

ITEMS, WIDTH = 30, 6

Batch = dict[str, Tensor]


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ITEMS, WIDTH)
        self.embedding_norm = nn.LayerNorm(WIDTH)
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        past = self.embedding_norm(self.embedding(history)).mean(dim=1)
        offered = self.embedding_norm(self.embedding(item))
        return self.tower(torch.cat([past, offered], dim=-1)).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["history"], batch["item"])
    return F.binary_cross_entropy_with_logits(scores, batch["bought"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "history": torch.randint(0, ITEMS, (16, 4), generator=generator),
        "item": torch.randint(0, ITEMS, (16,), generator=generator),
        "bought": torch.randint(0, 2, (16,), generator=generator).double(),
    }


case = Case(model=Recommender, batch=make_batch, loss=loss, layout="1x4")


class RowReducer:
    """Averages only those rows of an embedding that some rank has looked up."""

    def __init__(self, embedding: nn.Embedding, world_size: int) -> None:
        self.weight = embedding.weight
        self.world_size = world_size

    def touched(self, *ids: Tensor) -> Tensor:
        flags = torch.zeros(len(self.weight), dtype=torch.int32, device=self.weight.device)
        for looked_up in ids:
            flags[looked_up.flatten()] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.nonzero().flatten()

    def reduce(self, rows: Tensor) -> None:
        values = self.weight.grad[rows]
        dist.all_reduce(values)
        self.weight.grad[rows] = values / self.world_size


class Trainer:
    def __init__(self, model: Recommender, world_size: int) -> None:
        own = [name for name, _ in model.named_parameters() if name.startswith("embedding")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        self.reducer = RowReducer(model.embedding, world_size)
        self.ddp = DistributedDataParallel(model)

    def train_step(self, batch: Batch) -> float:
        value = loss(self.ddp, batch)
        value.backward()
        self.reducer.reduce(self.reducer.touched(batch["history"], batch["item"]))
        return value.item()


def step(model: Recommender, shard: Batch, rank: Rank) -> None:
    Trainer(model, rank.world_size).train_step(shard)
