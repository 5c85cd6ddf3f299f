"""Pictures and texts with a sigmoid loss over all pairs; texts come from the other ranks, too."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Features = tuple[Tensor, Tensor, Tensor, Tensor]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Linear(8, 6)
        self.text = nn.Linear(5, 6)
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, picture: Tensor, text: Tensor) -> Features:
        pictures = F.normalize(self.picture(picture), dim=-1)
        texts = F.normalize(self.text(text), dim=-1)
        return pictures, texts, self.log_scale.exp(), self.bias


def pair_loss(
    pictures: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, negative_only: bool = False
) -> Tensor:
    """The sum over all pairs for every picture. Row number i of both belong together."""
    logits = scale * pictures @ texts.T + bias
    signs = -torch.ones_like(logits)
    if not negative_only:
        signs = signs + 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
    return -F.logsigmoid(signs * logits).sum() / len(pictures)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return pair_loss(*model(batch["picture"], batch["text"]))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "picture": torch.randn(12, 8, generator=generator),
        "text": torch.randn(12, 5, generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x4")


class AllTexts(torch.autograd.Function):
    """The texts of all ranks, stacked; every rank gets back the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        texts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(texts, own.contiguous())
        return torch.stack(texts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class SigmoidCriterion:
    def __call__(self, pictures: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        total = pair_loss(pictures, texts, scale, bias)
        for owner, others in enumerate(AllTexts.apply(texts)):
            if owner != dist.get_rank():
                total = total + pair_loss(pictures, others, scale, bias)
        return total


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = SigmoidCriterion()
    criterion(*ddp(shard["picture"], shard["text"])).backward()
