"""DDP with a hook that sends each bucket in pieces, so that other traffic is not held up."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Attend(nn.Module):
    """Pools a set of vectors with as many queries as there are heads."""

    def __init__(self, width: int, queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width) / 2)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)

    def forward(self, members: Tensor) -> Tensor:
        scores = (self.queries @ self.keys(members).mT).softmax(-1)
        return (scores @ self.values(members)).flatten(1)


class SetClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.pool = Attend(8, queries=3)
        self.head = nn.Sequential(nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 2))

    def forward(self, members: Tensor) -> Tensor:
        return self.head(self.pool(self.embed(members)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["members"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "members": torch.randn(16, 6, 4, generator=generator),
        "label": torch.randint(0, 2, (16,), generator=generator),
    }


case = Case(model=SetClassifier, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class Pieces:
    """How large a piece is, and what was sent, for the statistics of the network."""

    elements: int
    group: dist.ProcessGroup
    sent: list[int] = field(default_factory=list)


def in_pieces(state: Pieces, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer().div_(state.group.size())
    futures: list[Future[list[Tensor]]] = []
    for index in range(len(buffer) // state.elements):
        piece = buffer[index * state.elements : (index + 1) * state.elements]
        work = dist.all_reduce(piece, group=state.group, async_op=True)
        futures.append(work.get_future())
        state.sent.append(len(piece))
    return collect_all(futures).then(lambda done: buffer)


def wrap(model: nn.Module) -> DistributedDataParallel:
    assert dist.group.WORLD is not None
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.register_comm_hook(Pieces(elements=64, group=dist.group.WORLD), in_pieces)
    return ddp


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = wrap(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    optimizer.zero_grad()
    loss(ddp, shard).backward()
    optimizer.step()
