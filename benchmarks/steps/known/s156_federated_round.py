"""One round of federated averaging. Pairs of clients hide what they send with masks."""

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from ddp_equivalence import Case, Rank

LEARNING_RATE = 0.5
ROUND = 7
Batch = tuple[Tensor, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_batch(generator: torch.Generator) -> Batch:
    inputs = torch.randn(18, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4", shards="3+6+4+5")


class Client:
    """Trains a copy of the model, and sends by how much its weights have moved."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.start = parameters_to_vector(model.parameters()).detach().clone()
        self.local = copy.deepcopy(model)
        self.number, self.clients = rank.rank, rank.world_size

    def train(self, batch: Batch) -> Tensor:
        optimizer = torch.optim.SGD(self.local.parameters(), lr=LEARNING_RATE)
        optimizer.zero_grad()
        loss(self.local, batch).backward()
        optimizer.step()
        return self.start - parameters_to_vector(self.local.parameters()).detach()

    def masks(self) -> Iterator[Tensor]:
        """One with each other client, who has the same with the other sign."""
        for other in range(self.clients):
            if other != self.number:
                low, high = sorted((self.number, other))
                shared = torch.Generator().manual_seed(ROUND * 1000 + low * 100 + high)
                mask = torch.rand(len(self.start), generator=shared, dtype=self.start.dtype)
                yield (mask if self.number == low else -mask).to(self.start.device)

    def message(self, moved: Tensor, share: float) -> Tensor:
        return share * (moved + sum(self.masks()))


def share_of_examples(batch: Batch) -> float:
    examples = torch.tensor(float(len(batch[1])), device=batch[1].device)
    dist.all_reduce(examples)
    return len(batch[1]) / float(examples)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    client = Client(model, rank)
    total = client.message(client.train(shard), share_of_examples(shard))
    dist.all_reduce(total)
    sizes = [p.numel() for p in model.parameters()]
    for p, moved in zip(model.parameters(), total.split(sizes), strict=True):
        p.grad = moved.view_as(p) / LEARNING_RATE
