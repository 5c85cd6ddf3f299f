"""Next-item prediction on sessions that do not divide by the ranks: join lets the short ranks wait."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ITEMS, LENGTH, DIM = 14, 5, 6
RATE, MOMENTUM = 0.2, 0.9
BIG_BATCHES = (4, 4, 2)  # of the last one, the second rank gets nothing


class SessionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.decay = nn.Parameter(torch.linspace(-1.0, 0.0, LENGTH))
        self.project = nn.Linear(DIM, DIM)
        self.scores = nn.Linear(DIM, ITEMS)

    def forward(self, session: Tensor) -> Tensor:
        weights = torch.softmax(self.decay, dim=0).view(1, LENGTH, 1)
        summary = (weights * self.items(session)).sum(dim=1)
        return self.scores(torch.tanh(self.project(summary)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["session"]), batch["next"])


def sessions(generator: torch.Generator) -> dict[str, Tensor]:
    count = sum(BIG_BATCHES)
    return {
        "session": torch.randint(ITEMS, (count, LENGTH), generator=generator),
        "next": torch.randint(ITEMS, (count,), generator=generator),
    }


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, nesterov=True)


class SessionLoader:
    """Deals two sessions to each rank in turn, and stops where there are none left."""

    def __init__(self, batch: dict[str, Tensor], rank: int, world: int, size: int = 2) -> None:
        self.batch, self.rank, self.world, self.size = batch, rank, world, size

    def __iter__(self):
        count = len(self.batch["next"])
        for start in range(self.rank * self.size, count, self.world * self.size):
            yield {name: value[start : start + self.size] for name, value in self.batch.items()}


def train(ddp: DistributedDataParallel, loader: SessionLoader) -> int:
    optimizer = make_optimizer(ddp.parameters())
    seen = 0
    with ddp.join(divide_by_initial_world_size=True):
        for part in loader:
            optimizer.zero_grad()
            loss(ddp, part).backward()
            optimizer.step()
            seen += len(part["next"])
    return seen


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    train(ddp, SessionLoader(batch, rank.rank, rank.world_size))


case = Case(model=SessionModel, batch=sessions, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": BIG_BATCHES}
