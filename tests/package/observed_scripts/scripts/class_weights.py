"""Trains on classes of which some are rare, and whose losses therefore weigh more."""

import start
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(options):
    torch.manual_seed(0)
    labels = (torch.rand(120) < 0.3).long() + (torch.rand(120) < 0.2).long()
    data = TensorDataset(torch.randn(120, 8), labels)
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 10.0]))
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
