"""Face recognition: a softmax over identities whose centres are divided over the ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

IDENTITIES, WIDTH, SCALE = 14, 6, 8.0


def gathered(x: Tensor) -> Tensor:
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


class DividedSoftmax(torch.autograd.Function):
    """The mean cross entropy over the faces of all ranks; its gradients are made on the way."""

    @staticmethod
    def forward(ctx: Any, faces: Tensor, centres: Tensor, identity: Tensor) -> Tensor:
        everyone, targets = gathered(faces), gathered(identity)
        local = IDENTITIES // dist.get_world_size()
        start, stop = local * dist.get_rank(), local * (dist.get_rank() + 1)
        logits = SCALE * everyone @ centres[start:stop].T
        top = logits.max(1, keepdim=True).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        exponentials = (logits - top).exp()
        total = exponentials.sum(1, keepdim=True)
        dist.all_reduce(total)
        (rows,) = torch.where(targets < stop)
        columns = targets[rows] - start
        picked = torch.zeros_like(total)
        picked[rows, 0] = logits[rows, columns]
        dist.all_reduce(picked)
        grad = exponentials / total
        grad[rows, columns] -= 1
        grad *= SCALE / len(everyone)
        grad_faces = grad @ centres[start:stop]
        dist.all_reduce(grad_faces)
        grad_centres = torch.zeros_like(centres)
        grad_centres[start:stop] = grad.T @ everyone
        own = slice(dist.get_rank() * len(faces), (dist.get_rank() + 1) * len(faces))
        ctx.save_for_backward(grad_faces[own], grad_centres)
        return (total.log() + top - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad * ctx.saved_tensors[0], grad * ctx.saved_tensors[1], None


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(9, 12), nn.PReLU(), nn.Linear(12, WIDTH))
        self.centres = nn.Parameter(torch.randn(IDENTITIES, WIDTH))
        self.divided = False

    def forward(self, faces: Tensor, identity: Tensor) -> Tensor:
        faces = F.normalize(self.features(faces))
        centres = F.normalize(self.centres)
        if self.divided:
            return DividedSoftmax.apply(faces, centres, identity)
        return F.cross_entropy(SCALE * faces @ centres.T, identity)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["faces"], batch["identity"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "faces": torch.randn(16, 9, generator=generator),
        "identity": torch.randint(0, IDENTITIES, (16,), generator=generator),
    }


case = Case(model=Recogniser, batch=make_batch, loss=loss, layout="1x2")


def step(model: Recogniser, shard: dict[str, Tensor], rank: Rank) -> None:
    model.divided = True
    loss(model, shard).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
