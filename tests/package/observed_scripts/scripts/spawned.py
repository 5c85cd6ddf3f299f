"""Makes a loader in the process that starts the ranks as well, and asks it for its length."""

import start
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader_of(sampler=None):
    data = TensorDataset(torch.ones(24, 4), torch.arange(24.0).reshape(24, 1))
    return DataLoader(data, batch_size=2, sampler=sampler), data


def train(options):
    data = loader_of()[1]
    loader, _ = loader_of(DistributedSampler(data))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    whole = [loader_of()[0] for _ in range(2)][1]  # the second one, as in the ranks
    print(f"{len(whole)} batches")
    start.run(train, "spawn")
