"""Spoken commands, with time along the first dim. Ranks have different numbers of recordings.

The mean loss of a rank is weighted with the rank's share of all recordings.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

FRAMES, BANDS, COMMANDS = 11, 5, 4

Batch = dict[str, Tensor]


class CommandModel(nn.Module):
    """Two recurrent layers; the features of the last frame are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(BANDS)
        self.recurrent = nn.GRU(BANDS, 7, num_layers=2)
        self.head = nn.Linear(7, COMMANDS)

    def forward(self, frames: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.norm(frames))
        return self.head(outputs[-1])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["frames"]), batch["command"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "frames": torch.randn(FRAMES, 15, BANDS, generator=generator),
        "command": torch.randint(COMMANDS, (15,), generator=generator),
    }


case = Case(
    model=CommandModel,
    batch=make_batch,
    loss=loss,
    layout="1+2",
    shards="7+5+3",
    batch_dims={"frames": 1},
)


class WeightedRanks:
    """How much this rank's mean loss counts, such that DDP's mean is the mean over recordings."""

    def __init__(self, rank: Rank) -> None:
        self.world_size = rank.world_size

    def weight(self, batch: Batch) -> Tensor:
        own = torch.tensor(len(batch["frames"])).to(batch["frames"])
        total = own.clone()
        dist.all_reduce(total)
        return self.world_size * own / total


class CommandTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = DistributedDataParallel(model)
        self.ranks = WeightedRanks(rank)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train_step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        (self.ranks.weight(batch) * value).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=100.0)
        self.optimizer.step()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    CommandTrainer(model, rank).train_step(shard)
