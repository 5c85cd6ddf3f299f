"""Examples that the loss of the case reads and no rank does, and the line that takes the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_equivalence import Case
from ddp_equivalence.report.blocks import source_of
from tests.diagnosis.where.faulty import average, distance, unnamed


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Every example has one row with a target, and two views of each of two rows without."""
    return {
        "rows": torch.randn(8, 6, generator=generator),
        "targets": torch.randint(0, 4, (8,), generator=generator),
        "weak": torch.randn(8, 2, 6, generator=generator),
        "strong": torch.randn(8, 2, 6, generator=generator),
    }


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def of_views(model: Any, weak: Tensor, strong: Tensor) -> Any:
    wanted = model(weak).softmax(-1).detach()
    return -(wanted * model(strong).log_softmax(-1)).sum(-1).mean()


def loss(model: Any, examples: dict[str, Tensor]) -> Any:
    views = (examples[name].flatten(0, 1) for name in ("weak", "strong"))
    labelled = functional.cross_entropy(model(examples["rows"]), examples["targets"])
    return labelled + of_views(model, *views)


def as_many_views_as_targets(model: Any, shard: Any, rank: Any) -> None:
    labelled = TensorDataset(shard["rows"], shard["targets"])
    views = TensorDataset(*(shard[name].flatten(0, 1) for name in ("weak", "strong")))
    loaders = (DataLoader(one, batch_size=2) for one in (labelled, views))
    parts = list(zip(*loaders, strict=False))  # fault
    for (rows, targets), (weak, strong) in parts:
        labelled_loss = functional.cross_entropy(model(rows), targets)
        ((labelled_loss + of_views(model, weak, strong)) / len(parts)).backward()
    average(model)


def of_series(model: Any, examples: dict[str, Tensor]) -> Any:
    windows = examples["series"].unfold(0, 4, 1).transpose(1, 2)
    wanted = windows[:, 3]
    return functional.huber_loss(model(windows[:, :3]), wanted, reduction="sum") / 12


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, past: Tensor) -> Any:
        _, hidden = self.encoder(past)
        return past[:, -1] + self.head(hidden[-1])


def windows_without_their_context(model: Any, batch: Any, rank: Any) -> None:
    own = batch["series"][rank.rank * 6 : (rank.rank + 1) * 6]  # fault
    ddp = DistributedDataParallel(model)
    (of_series(ddp, {"series": own}) * rank.world_size).backward()


def test_the_line_that_takes_a_part_is_shown_and_not_those_that_read_it() -> None:
    def series(generator: torch.Generator) -> dict[str, Tensor]:
        return {"series": torch.randn(15, 3, generator=generator)}

    case = Case(model=Forecast, loss=of_series, batch=series, layout="1x2", shards="own")
    where = unnamed(case, windows_without_their_context)
    assert where.headline == "no rank reads examples 12 to 14 of series"
    assert distance(replace(where, lines=where.lines[:1]), windows_without_their_context) == 0
    assert not any("self." in source_of(one.line) for one in where.lines if one.is_fault)


CASE = Case(model=model, loss=loss, batch=batch, layout="1x2")


def test_examples_that_no_rank_reads_are_named_with_the_line_that_takes_the_others() -> None:
    where = unnamed(CASE, as_many_views_as_targets)
    assert where.headline == "no rank reads examples 2, 3, 6, 7 of weak and strong"
    assert distance(where, as_many_views_as_targets) == 0, where.lines
    assert [line.is_fault for line in where.lines[:1]] == [True]


# Texts that each rank trims to the length of its longest one.


def texts(generator: torch.Generator) -> dict[str, Tensor]:
    """Twelve texts, of which the second six are padded to the length of the first six."""
    words, next_words = torch.randint(1, 11, (2, 12, 12), generator=generator)
    words[6:, 7:], next_words[6:, 7:] = 0, -100
    return {"words": words, "next": next_words}


def model_of_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def by_word(model: Any, words: Tensor, next_words: Tensor) -> Tensor:
    logits = model(words).flatten(0, 1)
    return functional.cross_entropy(
        logits, next_words.flatten(), ignore_index=-100, reduction="none"
    )


def loss_of_words(model: Any, examples: dict[str, Tensor]) -> Any:
    each = by_word(model, examples["words"], examples["next"])
    return each.sum() / (examples["next"] != -100).sum()


def trimmed(model: Any, shard: Any, rank: Any) -> None:
    longest = int((shard["words"] != 0).sum(1).max())
    words, next_words = shard["words"][:, :longest], shard["next"][:, :longest]
    weights = torch.linspace(1.0, 2.0, longest).repeat(len(words))
    (by_word(model, words, next_words) * weights).mean().backward()  # fault
    average(model)


def test_examples_that_are_read_without_their_padding_are_not_called_unread() -> None:
    where = unnamed(Case(model=model_of_words, loss=loss_of_words, batch=texts), trimmed)
    assert "no rank reads" not in where.headline
