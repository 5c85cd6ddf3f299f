"""Depth from single images: every rank reads the same table and a sampler picks its rows."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

WINDOW = 16  # rows of one step, on all ranks
STEPS = 3
LR = 0.1


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(3, 6, 2, stride=2)
        self.decode = nn.ConvTranspose2d(6, 1, 2, stride=2)

    def forward(self, images):
        return self.decode(torch.tanh(self.encode(images))).squeeze(1)


def scenes(generator):
    n = WINDOW * STEPS
    return {
        "images": torch.randn(n, 3, 4, 4, generator=generator),
        "depth": torch.rand(n, 4, 4, generator=generator) + 0.5,
    }


def loss(model, batch):
    error = (model(batch["images"]) - batch["depth"]).flatten(1)
    # Scale-invariant: the mean error of an image counts half.
    return (error.square().mean(1) - 0.5 * error.mean(1).square()).mean()


class Table(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["depth"])

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.columns.items()}


class WindowSampler(Sampler):
    """Shuffles inside windows, so that reads stay close together on disk."""

    def __init__(self, rows, window, rank, world_size, seed=17):
        self.rows, self.window = rows, window
        self.rank, self.world_size = rank, world_size
        self.seed = seed

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.rank)
        for start in range(0, self.rows, self.window):
            order = torch.randperm(self.window, generator=generator) + start
            yield from order[self.rank :: self.world_size].tolist()

    def __len__(self):
        return self.rows // self.world_size


def step(model, batch, rank):
    table = Table(batch)
    sampler = WindowSampler(len(table), WINDOW, int(rank), rank.world_size)
    loader = DataLoader(table, batch_size=WINDOW // rank.world_size, sampler=sampler)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for shard in loader:
        optimizer.zero_grad()
        loss(ddp, shard).backward()
        optimizer.step()


case = Case(model=Depth, batch=scenes, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "lr": LR, "steps": STEPS}
