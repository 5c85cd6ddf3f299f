"""Dense retrieval: every question is compared with the passages of all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SCALE = 4.0


class BiEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.question = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 4))
        self.passage = nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 4))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        questions = F.normalize(self.question(batch["question"]), dim=-1)
        return questions, F.normalize(self.passage(batch["passage"]), dim=-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = SCALE * torch.einsum("qd,pd->qp", *model(batch))
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "question": torch.randn(14, 7, generator=generator),
        "passage": torch.randn(14, 9, generator=generator),
    }


case = Case(model=BiEncoder, batch=make_batch, loss=loss, layout="1x3", shards="6+5+3")


@dataclass
class Gathered:
    rows: Tensor
    sizes: list[int]


class RaggedGather:
    """Gathers rows of ranks with unequal batches, such as the last ones of an epoch."""

    def __init__(self, rank: Rank) -> None:
        self.world_size = rank.world_size

    def sizes(self, rows: Tensor) -> list[int]:
        counts = [rows.new_zeros(1, dtype=torch.long) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        return [int(count) for count in counts]

    def __call__(self, rows: Tensor) -> Gathered:
        sizes = self.sizes(rows)
        padded = F.pad(rows, (0, 0, 0, max(sizes) - len(rows)))
        parts = all_gather(padded)
        kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return Gathered(torch.cat(kept), sizes)


class InBatchNegatives:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.gather = RaggedGather(rank)

    def __call__(self, questions: Tensor, passages: Tensor) -> Tensor:
        gathered = self.gather(passages)
        scores = SCALE * questions @ gathered.rows.T
        positives = torch.arange(len(questions)) + self.rank.rank * len(questions)
        total = F.cross_entropy(scores, positives.to(scores.device), reduction="sum")
        return total * self.rank.world_size / sum(gathered.sizes)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = InBatchNegatives(rank)
    criterion(*ddp(shard)).backward()
