"""Semi-supervised learning: where the model is sure about a weakly changed image, its answer is
the label of the strongly changed one. All images go through the model in one call.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SURE, UNLABELLED_WEIGHT = 0.38, 1.0


@dataclass
class Mixed:
    """``weak`` and ``strong`` hold two unlabelled images for each labelled one."""

    labelled: Tensor
    label: Tensor
    weak: Tensor
    strong: Tensor


class Classifier(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.filters = nn.Conv1d(2, 6, 3, padding=1)
        self.classify = nn.Linear(6, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(F.silu(self.filters(images)).amax(-1))


def consistency(weak_logits: Tensor, strong_logits: Tensor) -> Tensor:
    """A mean over all unlabelled images; those of which the model is not sure count as 0."""
    confidence, answer = weak_logits.detach().softmax(-1).max(-1)
    losses = F.cross_entropy(strong_logits, answer, reduction="none")
    return (losses * (confidence >= SURE)).mean()


def loss(model: nn.Module, batch: Mixed) -> Tensor:
    supervised = F.cross_entropy(model(batch.labelled), batch.label)
    weak, strong = model(batch.weak.flatten(0, 1)), model(batch.strong.flatten(0, 1))
    return supervised + UNLABELLED_WEIGHT * consistency(weak, strong)


def make_batch(generator: torch.Generator) -> Mixed:
    plain = torch.randn(8, 2, 2, 7, generator=generator)
    return Mixed(
        labelled=torch.randn(8, 2, 7, generator=generator),
        label=torch.randint(4, (8,), generator=generator),
        weak=plain.flip(-1),
        strong=plain + 0.8 * torch.randn(8, 2, 2, 7, generator=generator),
    )


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="2x2")


class SemiSupervised:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model, broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.03)

    def losses(self, batch: Mixed) -> tuple[Tensor, Tensor]:
        weak, strong = batch.weak.flatten(0, 1), batch.strong.flatten(0, 1)
        logits = self.ddp(torch.cat((batch.labelled, weak, strong)))
        labelled, unlabelled = logits.tensor_split([len(batch.labelled)])
        strong_logits, weak_logits = unlabelled.chunk(2)
        supervised = F.cross_entropy(labelled, batch.label)
        return supervised, consistency(weak_logits, strong_logits)

    def train_on(self, batch: Mixed) -> None:
        self.optimizer.zero_grad()
        supervised, unsupervised = self.losses(batch)
        (supervised + UNLABELLED_WEIGHT * unsupervised).backward()
        self.optimizer.step()


def step(model: nn.Module, shard: Mixed, rank: Rank) -> None:
    SemiSupervised(model).train_on(shard)
