"""Trains models with state that no gradient reaches. ``reduced``: the ranks reduce its changes.
``plain``: the models keep it in tensors that are no buffers.
"""

import copy

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    def __init__(self, reduces):
        super().__init__()
        self.reduces = reduces
        self.layer = nn.Linear(6, 4)
        self.register_buffer("codes", torch.randn(8, 4))

    def mean(self, values):
        with torch.no_grad():
            mean = values.mean(0)
            if self.reduces and dist.get_world_size() > 1:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
        return mean

    def forward(self, inputs):
        values = self.layer(inputs)
        nearest = torch.cdist(values, self.codes).argmin(1)
        chosen = F.one_hot(nearest, len(self.codes)).to(values.dtype)
        found = self.codes[nearest]
        moved = self.mean(chosen[:, :, None] * (values[:, None] - self.codes))
        if self.training:
            self.codes.add_(moved, alpha=0.5)
        return (values - found).square().mean()


class Centre(Codebook):
    def forward(self, inputs):
        values = self.layer(inputs)
        centre = self.codes[0].clone()
        self.codes[0] = 0.5 * centre + 0.5 * self.mean(values.detach())
        return torch.tanh(values - centre).square().mean()


class Normalised(Codebook):
    """Batch norm by the statistics that it had before, as with frozen layers, and a count."""

    def __init__(self, reduces):
        super().__init__(reduces)
        self.norm = nn.BatchNorm1d(4).eval()
        self.register_buffer("rows", torch.zeros(()))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs):
        self.rows += len(inputs)
        return self.norm(self.layer(inputs)).square().mean()


class Teacher(Codebook):
    """The teacher is a copy of the layer whose weights are buffers, moved after each step."""

    def __init__(self, reduces):
        super().__init__(reduces)
        self.register_buffer("weight", copy.deepcopy(self.layer.weight.detach()))

    def forward(self, inputs):
        return (self.layer(inputs) - F.linear(inputs, self.weight)).square().mean()

    def follow(self):
        self.weight.mul_(0.9).add_(self.layer.weight.detach(), alpha=0.1)


class Late(Codebook):
    """The codes are moved after the optimizer's step, by the rows of that step."""

    def forward(self, inputs):
        values = self.layer(inputs)
        self.nearest = torch.cdist(values.detach(), self.codes).argmin(1)
        self.values = values.detach()
        return (values - self.codes[self.nearest]).square().mean()

    def follow(self):
        chosen = F.one_hot(self.nearest, len(self.codes)).to(self.values.dtype)
        moved = self.mean(chosen[:, :, None] * (self.values[:, None] - self.codes))
        self.codes.add_(moved, alpha=0.5)


class Scheduled(Late):
    """How far the codes are moved depends on a count that is in no buffer."""

    def follow(self):
        self.count = getattr(self, "count", 0) + 1
        before = self.codes.clone()
        super().follow()
        self.codes.lerp_(before, 1 / self.count)


class Centers(nn.Module):
    """A loss without a parameter, whose tensor is another one after each step."""

    def __init__(self, mean):
        super().__init__()
        self.mean, self.center = mean, torch.zeros(4)

    def forward(self, values):
        return (torch.tanh(values) - self.center).square().mean()

    def move(self, values):
        self.center = 0.5 * self.center + 0.5 * self.mean(values)


class Loss(Codebook):
    """The loss is a module of its own."""

    def __init__(self, reduces):
        super().__init__(reduces)
        self.loss = [Centers(self.mean)]  # no part of the model

    def forward(self, inputs):
        self.values = self.layer(inputs)
        return self.values

    def follow(self):
        self.loss[0].move(self.values.detach())


class Keeps(Codebook):
    """Keeps what it computes and reads, and another view of its weights: nothing that decides."""

    def __init__(self, reduces):
        super().__init__(reduces)
        self.flat, self.rows = self.layer.weight.data.view(-1), torch.zeros(4, 6)

    def forward(self, inputs):
        self.rows, self.values = inputs, self.layer(inputs)
        self.hidden, self.norm = self.values.detach(), self.flat.norm()
        if not hasattr(self, "mask"):
            self.mask = torch.arange(4)
        loss = (self.values * self.mask).square().mean()
        self.loss_value = loss.detach()
        return loss


KINDS = {
    one.__name__.lower(): one
    for one in (Codebook, Centre, Normalised, Teacher, Late, Scheduled, Loss, Keeps)
}


def train(options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = KINDS[options[0]]("reduced" in options)
    for name in [*model._buffers] if "plain" in options else ():
        setattr(model, name, model._buffers.pop(name))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for (inputs,) in loader:
        optimizer.zero_grad()
        result = ddp(inputs)
        if hasattr(model, "loss"):
            result = model.loss[0](result)
        result.backward()
        optimizer.step()
        if hasattr(model, "follow"):
            model.follow()


if __name__ == "__main__":
    start.run(train)
