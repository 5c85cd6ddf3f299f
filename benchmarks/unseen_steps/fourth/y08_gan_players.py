"""A conditional GAN: generator and discriminator take turns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

EXAMPLES, NOISE, LABELS, PIXELS = 16, 5, 4, 9

Batch = dict[str, Tensor]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Embedding(LABELS, NOISE)
        self.body = nn.Sequential(nn.Linear(NOISE, 12), nn.Tanh(), nn.Linear(12, PIXELS))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.body(noise + self.condition(labels))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PIXELS, 12), nn.Tanh())
        self.score = nn.Linear(12, LABELS)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.score(self.body(images)).gather(1, labels.unsqueeze(1)).squeeze(1)


class Players(nn.Module):
    """One module with two players, so that one wrapper synchronises both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, turn: str, images_or_noise: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        if turn == "discriminator":
            return (self.discriminator(images_or_noise, labels),)
        fake = self.generator(images_or_noise, labels)
        return self.discriminator(fake, labels), fake


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def loss(model: Players, batch: Batch) -> Tensor:
    """Each player's own loss, in which the other one is held fixed."""
    labels = batch["labels"]
    fake = model.generator(batch["noise"], labels)
    players_loss = hinge(
        model.discriminator(batch["real"], labels), model.discriminator(fake.detach(), labels)
    )
    fixed = {name: value.detach() for name, value in model.discriminator.named_parameters()}
    return players_loss - functional_call(model.discriminator, fixed, (fake, labels)).mean()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "real": torch.randn(EXAMPLES, PIXELS, generator=generator),
        "noise": torch.randn(EXAMPLES, NOISE, generator=generator),
        "labels": torch.randint(LABELS, (EXAMPLES,), generator=generator),
    }


case = Case(model=Players, batch=make_batch, loss=loss, layout="1x2")


def set_requires_grad(network: nn.Module, requires_grad: bool) -> None:
    for parameter in network.parameters():
        parameter.requires_grad_(requires_grad)


class GameMaster:
    """Alternates between the players; the one whose turn it is not stays fixed."""

    def __init__(self, players: Players, first: str = "generator") -> None:
        self.players = players
        self.set_turn(first)
        self.ddp = DistributedDataParallel(players, find_unused_parameters=True)

    def set_turn(self, turn: str) -> None:
        for name in ("generator", "discriminator"):
            set_requires_grad(getattr(self.players, name), name == turn)

    def play(self, batch: Batch) -> None:
        labels = batch["labels"]
        score, fake = self.ddp("generator", batch["noise"], labels)
        (-score.mean()).backward()
        self.set_turn("discriminator")
        images = torch.cat([batch["real"], fake.detach()])
        (scores,) = self.ddp("discriminator", images, labels.repeat(2))
        hinge(*scores.chunk(2)).backward()
        self.set_turn("generator")


def step(model: Players, shard: Batch, rank: Rank) -> None:
    GameMaster(model).play(shard)
