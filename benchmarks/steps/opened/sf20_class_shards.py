"""Face recognition: the backbone is replicated, the classes of the margin softmax are sharded over the ranks.

Every rank sees the embeddings of all ranks, and scores them against its own classes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PIXELS, DIM, IDENTITIES = 12, 6, 9
SCALE, MARGIN = 8.0, 0.3


class FaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(PIXELS, 14), nn.PReLU(), nn.Linear(14, DIM))
        self.identities = nn.Parameter(torch.randn(IDENTITIES, DIM))


def cosines(embeddings: Tensor, identities: Tensor) -> Tensor:
    return F.normalize(embeddings, dim=1) @ F.normalize(identities, dim=1).T


def loss(model: FaceModel, batch: dict[str, Tensor]) -> Tensor:
    scores = cosines(model.backbone(batch["faces"]), model.identities)
    margin = MARGIN * F.one_hot(batch["identity"], IDENTITIES).to(scores.dtype)
    return F.cross_entropy(SCALE * (scores - margin), batch["identity"])


def faces(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "faces": torch.randn(12, PIXELS, generator=generator),
        "identity": torch.randint(IDENTITIES, (12,), generator=generator),
    }


def gather(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


class GatherEmbeddings(torch.autograd.Function):
    """Each rank scores other classes, so what they say about a row is added up."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.first, ctx.count = dist.get_rank() * len(rows), len(rows)
        return gather(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.first : ctx.first + ctx.count]


class ShardedCrossEntropy(torch.autograd.Function):
    """Of scores (all examples, own classes); ``hits`` is 1 where the own class is the right one."""

    @staticmethod
    def forward(ctx, scores: Tensor, hits: Tensor) -> Tensor:
        top = scores.max(dim=1, keepdim=True).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        exponentials = (scores - top).exp()
        total = exponentials.sum(dim=1, keepdim=True)
        dist.all_reduce(total)
        right = ((scores - top) * hits).sum(dim=1, keepdim=True)
        dist.all_reduce(right)
        ctx.save_for_backward(exponentials / total, hits)
        return (total.log() - right).mean()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, hits = ctx.saved_tensors
        return gradient * (probabilities - hits) / len(hits), None


class ClassShards:
    def __init__(self, identities: Tensor, mesh: DeviceMesh) -> None:
        self.table = distribute_tensor(identities.detach(), mesh, [Shard(0)])
        self.own = self.table.to_local().clone().requires_grad_()
        mine = distribute_tensor(torch.arange(IDENTITIES), mesh, [Shard(0)])
        self.classes = mine.to_local()

    def __call__(self, embeddings: Tensor, identity: Tensor) -> Tensor:
        everyone, labels = GatherEmbeddings.apply(embeddings), gather(identity)
        hits = (labels.unsqueeze(1) == self.classes).to(everyone.dtype)
        scores = SCALE * (cosines(everyone, self.own) - MARGIN * hits)
        return ShardedCrossEntropy.apply(scores, hits)

    def gradient(self) -> Tensor:
        whole = DTensor.from_local(
            self.own.grad,
            self.table.device_mesh,
            self.table.placements,
            shape=self.table.shape,
            stride=self.table.stride(),
        )
        return whole.full_tensor()


def step(model, shard, rank):
    backbone = DistributedDataParallel(model.backbone)
    head = ClassShards(model.identities, init_device_mesh("cpu", (rank.world_size,)))
    head(backbone(shard["faces"]), shard["identity"]).backward()
    found = {f"backbone.{name}": p.grad for name, p in model.backbone.named_parameters()}
    return found | {"identities": head.gradient()}


case = Case(model=FaceModel, batch=faces, loss=loss, layout="1x2")
