"""Audio autoencoder. Gradients live in one flat vector; rank r is responsible for its r-th piece."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(1, 5, kernel_size=4, stride=2, padding=1)
        self.code = nn.Conv1d(5, 3, kernel_size=3, padding=1)
        self.up = nn.ConvTranspose1d(3, 5, kernel_size=4, stride=2, padding=1)
        self.wave = nn.Conv1d(5, 1, kernel_size=3, padding=1)

    def forward(self, sound):
        code = torch.tanh(self.code(torch.relu(self.down(sound))))
        return self.wave(torch.relu(self.up(code)))


def sounds(generator):
    time = torch.linspace(0, 6.28, 16)
    pitch = torch.rand(16, 1, generator=generator) * 3 + 0.5
    return (torch.sin(pitch * time) + 0.1 * torch.randn(16, 16, generator=generator)).unsqueeze(1)


def reconstruction(model, sound):
    error = model(sound) - sound
    return error.square().mean() + 0.1 * error.abs().mean()


class FlatGradients:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.rank = rank
        self.parameters = list(model.parameters())
        self.flat = torch.cat([p.grad.reshape(-1) for p in self.parameters])

    def pieces(self):
        world = self.rank.world_size
        size = self.flat.numel() // world
        return [self.flat[r * size : (r + 1) * size] for r in range(world)]

    def reduce_scatter(self):
        for owner, piece in enumerate(self.pieces()):
            dist.reduce(piece, owner)
            if owner == self.rank.rank:
                piece /= self.rank.world_size

    def all_gather(self):
        for owner, piece in enumerate(self.pieces()):
            dist.broadcast(piece, owner)

    def unflatten(self):
        start = 0
        for p in self.parameters:
            p.grad = self.flat[start : start + p.numel()].view_as(p).clone()
            start += p.numel()


case = Case(model=Codec, batch=sounds, loss=reconstruction, layout="1x4")


def step(model, shard, rank):
    reconstruction(model, shard).backward()
    gradients = FlatGradients(model, rank)
    gradients.reduce_scatter()
    gradients.all_gather()
    gradients.unflatten()
