"""A character model. The collate function puts the target of each character at its own place."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

LETTERS, LENGTH = 12, 8
IGNORE = -100


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(text))[0])


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch)[:, :-1]
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randint(0, LETTERS, (10, LENGTH), generator=generator)


case = Case(model=CharacterModel, batch=make_batch, loss=loss, layout="1x2")


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    text = torch.stack(rows)
    targets = torch.roll(text, shifts=1, dims=1)
    targets[:, -1] = IGNORE
    return {"text": text, "targets": targets}


def criterion(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


class Trainer:
    """Calls back after the backward pass, and before anybody uses the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.after_backward: list[Callable[[nn.Module], None]] = []

    def fit_batch(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad()
        criterion(self.model(batch["text"]), batch["targets"]).backward()
        for call in self.after_backward:
            call(self.model)


@torch.no_grad()
def synchronise(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    trainer = Trainer(model)
    trainer.after_backward.append(synchronise)
    trainer.fit_batch(collate(list(shard)))
