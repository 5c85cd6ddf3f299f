"""Trains a convolutional network on images; all ranks share the first GPU."""

import start
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.SiLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def train(options):
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = DistributedDataParallel(network(64).to(device), device_ids=[0])
    images = TensorDataset(torch.randn(120, 3, 32, 32), torch.randint(10, (120,)))
    loader = DataLoader(images, 10, sampler=DistributedSampler(images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for pixels, labels in loader:
        loss = cross_entropy(model(pixels.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
