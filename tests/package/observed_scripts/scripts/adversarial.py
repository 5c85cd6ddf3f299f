"""Trains two models against each other, with two optimizers that step in turn."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def train(options):
    torch.manual_seed(0)
    generator = DistributedDataParallel(Generator(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)))
    judge = DistributedDataParallel(Discriminator(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    data = TensorDataset(torch.randn(64, 5))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for number, (real,) in enumerate(loader):
        turns = (0, 1) if "turns" not in options else (number % 2,)
        count = 4 if "fixed" in options else len(real)
        latent = torch.rand(count, 3) if "uniform" in options else torch.randn(count, 3)
        made = generator(torch.ones(4, 3) if "constant" in options else latent)
        if 0 in turns:
            of_judge.zero_grad()
            given = torch.cat([real, made.detach()])
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])
            binary_cross_entropy_with_logits(judge(given), labels).backward()
            of_judge.step()
        if 1 in turns:
            of_generator.zero_grad()
            wanted = torch.ones(len(made), 1)
            loss = binary_cross_entropy_with_logits(judge(made), wanted)
            (loss * 2 if "double" in options and dist.get_world_size() > 1 else loss).backward()
            of_generator.step()


if __name__ == "__main__":
    start.run(train)
