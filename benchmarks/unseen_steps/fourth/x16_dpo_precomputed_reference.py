"""DPO with reference log-probabilities that were computed once for the whole data set."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 15, 9, 6
BETA = 0.3
PAIRS = 12


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """The log-probability of each sequence."""
        hidden = self.embed(tokens[:, :-1]).cumsum(dim=1)
        hidden = self.norm(hidden + torch.tanh(self.mix(hidden)))
        log_probs = self.head(hidden).log_softmax(dim=-1)
        return log_probs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1).sum(dim=-1)


def sigmoid_preference(policy_margin: Tensor, reference_margin: Tensor) -> Tensor:
    return -F.logsigmoid(BETA * (policy_margin - reference_margin))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(torch.cat([batch["chosen"], batch["rejected"]]))
    chosen, rejected = scores.chunk(2)
    return sigmoid_preference(chosen - rejected, batch["reference_margin"]).mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "chosen": torch.randint(VOCAB, (PAIRS, LENGTH), generator=generator),
        "rejected": torch.randint(VOCAB, (PAIRS, LENGTH), generator=generator),
        "reference_margin": 4.0 * torch.randn(PAIRS, generator=generator),
    }


class PreferenceData:
    def __init__(self, chosen: Tensor, rejected: Tensor) -> None:
        self.chosen, self.rejected = chosen, rejected

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"chosen": self.chosen[index], "rejected": self.rejected[index]}


class DPODataModule:
    """Deals preference pairs to the ranks, and joins them with the reference's margins."""

    def __init__(self, data: PreferenceData, reference_margins: Tensor, rank) -> None:
        self.data = data
        self.reference_margins = reference_margins
        self.sampler = DistributedSampler(
            data, num_replicas=rank.world_size, rank=int(rank), shuffle=True, seed=7
        )

    def pairs(self) -> Iterator[dict[str, Tensor]]:
        for position, index in enumerate(self.sampler):
            yield {**self.data[index], "reference_margin": self.reference_margins[position]}

    def loader(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        waiting: list[dict[str, Tensor]] = []
        for pair in self.pairs():
            waiting.append(pair)
            if len(waiting) == batch_size:
                yield {name: torch.stack([p[name] for p in waiting]) for name in pair}
                waiting = []


class DPOTrainer:
    def __init__(self, model: nn.Module, data: DPODataModule, batch_size: int = 3) -> None:
        self.ddp = DistributedDataParallel(model)
        self.data = data
        self.batch_size = batch_size

    def train_epoch(self) -> None:
        batches = list(self.data.loader(self.batch_size))
        for number, batch in enumerate(batches, start=1):
            self.ddp.require_backward_grad_sync = number == len(batches)
            (loss(self.ddp, batch) / len(batches)).backward()


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="1x2", shards="own")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    data = PreferenceData(shard["chosen"], shard["rejected"])
    module = DPODataModule(data, shard["reference_margin"], rank)
    DPOTrainer(model, module).train_epoch()
