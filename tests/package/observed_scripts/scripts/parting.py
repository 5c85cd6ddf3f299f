"""Trains right gradients; a word on the command line lets the optimizers of the ranks differ."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class NoisySGD(SGD):
    """Adds noise to the weights, and draws it by rank."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight += 0.01 * torch.randn(weight.shape)


def saved_state(net):
    """The state of an optimizer that has made a step, as from a checkpoint."""
    optimizer = AdamW(net.parameters(), lr=1e-2)
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    before = [weight.detach().clone() for weight in net.parameters()]
    optimizer.step()
    for weight, old in zip(net.parameters(), before, strict=True):
        weight.data.copy_(old)
        weight.grad = None
    return optimizer.state_dict()


def train(options):
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    state = saved_state(net)
    model = DistributedDataParallel(net)
    if "adam" in options:
        optimizer = AdamW(net.parameters(), lr=1e-2)
    elif "noisy" in options:
        optimizer = NoisySGD(net.parameters(), lr=0.1)
    else:
        own_decay = 0.1 * rank if "decay" in options else 0.0
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=own_decay)
    if "loaded" in options and (rank == 0 or "on_all" in options):
        optimizer.load_state_dict(state)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))
    torch.manual_seed(rank)
    for number, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "plateau" in options:
            own = loss.detach() * (1 - rank if "own" in options else 1)
            dist.all_reduce(own) if "own" not in options else None
            scheduler.step(own)
        if "by_hand" in options and number == 0:
            for group in optimizer.param_groups:
                group["lr"] *= 1 + rank
        if "cleared" in options and number == 0 and rank == 1:
            optimizer.state.clear()


if __name__ == "__main__":
    start.run(train)
