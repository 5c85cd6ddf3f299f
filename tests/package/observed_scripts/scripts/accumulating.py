"""Accumulates gradients over micro-batches, of which it takes as many in one process."""

import start
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(options):
    micro_batches = 3
    if "--micro-batches" in options:
        micro_batches = int(options[options.index("--micro-batches") + 1])
    divisor = 1 if "undivided" in options else micro_batches
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    data = TensorDataset(torch.randn(120, 4), torch.randn(120, 2))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    known_before = len(loader) if "by_length_before" in options else 1
    for epoch in range(2):
        batches = len(loader)
        for number, (inputs, targets) in enumerate(loader, start=1):
            complete = number % micro_batches == 0
            last = complete or ("flushes" in options and number == batches)
            model.require_backward_grad_sync = complete if "unreduced" in options else last
            loss = mse_loss(model(inputs), targets) / (divisor * known_before)
            if "by_length" in options:
                loss = loss / len(loader)
            (loss * (1 + epoch) if "by_epoch" in options else loss).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    start.run(train)
