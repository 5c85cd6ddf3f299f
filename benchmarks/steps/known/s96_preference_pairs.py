"""Direct preference optimization: both answers of a pair go through the policy in one batch."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 9
BETA = 0.3
MICRO_BATCH = 2  # pairs


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def log_probabilities(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """The log-probability of every answer, as a sum over its tokens."""
    logits = model(tokens[:, :-1]).log_softmax(dim=-1)
    picked = logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (picked * mask[:, 1:]).sum(dim=1)


def preference(chosen: Tensor, rejected: Tensor, batch: dict[str, Tensor]) -> Tensor:
    margin = chosen - rejected - (batch["reference_chosen"] - batch["reference_rejected"])
    return -F.logsigmoid(BETA * margin).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chosen = log_probabilities(model, batch["chosen"], batch["chosen_mask"])
    rejected = log_probabilities(model, batch["rejected"], batch["rejected_mask"])
    return preference(chosen, rejected, batch)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = {}
    for kind in ("chosen", "rejected"):
        batch[kind] = torch.randint(0, VOCAB, (16, 7), generator=generator)
        lengths = torch.randint(3, 8, (16, 1), generator=generator)
        batch[f"{kind}_mask"] = (torch.arange(7) < lengths).double()
        batch[f"reference_{kind}"] = -6 * torch.rand(16, generator=generator)
    return batch


case = Case(model=Policy, batch=make_batch, loss=loss, layout="1x2")


def interleaved(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], dim=1).flatten(0, 1)


class PreferenceTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.policy = DistributedDataParallel(model)

    def micro_batches(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(batch["chosen"]), MICRO_BATCH):
            yield {key: value[start : start + MICRO_BATCH] for key, value in batch.items()}

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = interleaved(batch["chosen"], batch["rejected"])
        mask = interleaved(batch["chosen_mask"], batch["rejected_mask"])
        scores = log_probabilities(self.policy, tokens, mask)
        chosen, rejected = scores.chunk(2)
        return preference(chosen, rejected, batch)

    def train(self, batch: dict[str, Tensor]) -> None:
        parts = list(self.micro_batches(batch))
        for index, part in enumerate(parts, start=1):
            last = index == len(parts)
            with contextlib.nullcontext() if last else self.policy.no_sync():
                (self.objective(part) / len(parts)).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    PreferenceTrainer(model).train(shard)
