"""Face recognition: an angular margin, and a softmax over identities that is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

FACES, PIXELS, EMBEDDING, IDENTITIES = 12, 8, 6, 10

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Margin:
    scale: float = 8.0
    margin: float = 0.3

    def __call__(self, cosine: Tensor, is_target: Tensor) -> Tensor:
        return self.scale * (cosine - self.margin * is_target)


class FaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(PIXELS, 12), nn.PReLU(), nn.Linear(12, EMBEDDING))
        self.centers = nn.Parameter(torch.randn(IDENTITIES, EMBEDDING))

    def forward(self, faces: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.backbone(faces), dim=1), F.normalize(self.centers, dim=1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    embeddings, centers = model(batch["faces"])
    is_target = F.one_hot(batch["identity"], IDENTITIES).to(embeddings.dtype)
    return F.cross_entropy(Margin()(embeddings @ centers.T, is_target), batch["identity"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "faces": torch.randn(FACES, PIXELS, generator=generator),
        "identity": torch.randint(IDENTITIES, (FACES,), generator=generator),
    }


case = Case(model=FaceModel, batch=make_batch, loss=loss, layout="1x2")


class SplitSoftmax:
    """Cross entropy where every rank has the logits of some identities only."""

    def __init__(self, rank: Rank, identities: int = IDENTITIES) -> None:
        per_rank = identities // rank.world_size
        self.first = int(rank) * per_rank
        self.slice = slice(self.first, self.first + per_rank)
        self.margin = Margin()

    def targets(self, identity: Tensor) -> Tensor:
        """One-hot rows; those of identities elsewhere are empty."""
        every = F.one_hot(identity, IDENTITIES)
        return every[:, self.slice]

    def log_partition(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum over all identities, without overflow."""
        highest = logits.detach().amax(dim=1, keepdim=True)
        exponentials = (logits - highest).exp().sum(dim=1, keepdim=True)
        return dist_fn.all_reduce(exponentials).log() + highest

    def __call__(self, embeddings: Tensor, centers: Tensor, identity: Tensor) -> Tensor:
        is_target = self.targets(identity).to(embeddings.dtype)
        logits = self.margin(embeddings @ centers[self.slice].T, is_target)
        of_target = dist_fn.all_reduce((logits * is_target).sum(dim=1, keepdim=True))
        return (self.log_partition(logits) - of_target).mean()


class FaceTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.world_size = rank.world_size
        self.softmax = SplitSoftmax(rank)
        self.ddp = DistributedDataParallel(model)

    def gather_labels(self, identity: Tensor) -> Tensor:
        parts = [torch.empty_like(identity) for _ in range(self.world_size)]
        dist.all_gather(parts, identity)
        return torch.cat(parts)

    def train_step(self, batch: Batch) -> None:
        embeddings, centers = self.ddp(batch["faces"])
        everyone = torch.cat(dist_fn.all_gather(embeddings))
        self.softmax(everyone, centers, self.gather_labels(batch["identity"])).backward()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    FaceTrainer(model, rank).train_step(shard)
