"""Images and texts that belong together, learned with a sigmoid loss of every pair.

Images stay on their rank and meet the texts of all ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class Pairs(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, width))
        self.words = nn.EmbeddingBag(23, width)
        self.log_scale = nn.Parameter(torch.tensor(1.2))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.words(texts), dim=-1)
        return image, text, self.log_scale.exp(), self.bias


def pair_losses(scores: Tensor, partner: Tensor) -> Tensor:
    """For every image, its loss over all texts. ``partner`` is the column of its own text."""
    sign = 2.0 * F.one_hot(partner.to(scores.device), scores.shape[1]) - 1.0
    return -F.logsigmoid(sign * scores).sum(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    image, text, scale, bias = model(batch["images"], batch["texts"])
    scores = scale * image @ text.mT + bias
    return pair_losses(scores, torch.arange(len(scores))).mean()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(12, 8, generator=generator),
        "texts": torch.randint(23, (12, 4), generator=generator),
    }


case = Case(model=Pairs, batch=make_batch, loss=loss, layout="2x2")


class PairTrainer:
    """Trains on the images of one rank and the texts of all."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02)
        self.position = rank.local_rank

    def partners(self, images: int) -> Tensor:
        """The columns in which the texts of this rank's images are."""
        return self.position * images + torch.arange(images)

    def train_on(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        image, text, scale, bias = self.ddp(batch["images"], batch["texts"])
        texts = torch.cat(all_gather(text))
        scores = scale * image @ texts.mT + bias
        value = pair_losses(scores, self.partners(len(image))).mean()
        value.backward()
        self.optimizer.step()
        return value.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    PairTrainer(model, rank).train_on(shard)
