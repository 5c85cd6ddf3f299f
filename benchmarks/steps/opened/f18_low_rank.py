"""Low-rank gradient exchange: matrices travel as two factors, vectors as they are."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class CompressionConfig:
    max_rank: int = 16  # at least the smaller side of every matrix: no loss, for warm-up
    seed: int = 7


class PatchMixer(nn.Module):
    def __init__(self, patches=4, channels=6, classes=3):
        super().__init__()
        self.token_mix = nn.Linear(patches, patches)
        self.channel_mix = nn.Linear(channels, 2 * channels)
        self.norm = nn.LayerNorm(2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, patches):
        x = patches + self.token_mix(patches.transpose(1, 2)).transpose(1, 2)
        x = F.gelu(self.norm(self.channel_mix(x)))
        return self.head(x.mean(dim=1))


def classification_loss(model, batch):
    return F.cross_entropy(model(batch["patches"]), batch["labels"])


def average(tensor):
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def orthonormal(matrix):
    return torch.linalg.qr(matrix).Q


class LowRankExchange:
    """One round of power iteration per step; the ranks share the start of the right factor."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.generator = torch.Generator().manual_seed(cfg.seed)

    def right_factor(self, matrix):
        rank = min(self.cfg.max_rank, *matrix.shape)
        start = torch.randn(
            matrix.shape[1], rank, generator=self.generator, dtype=matrix.dtype
        )
        return orthonormal(start)

    def compress(self, matrix):
        right = self.right_factor(matrix)
        left = average(orthonormal(matrix @ right))
        right = average(matrix.T @ left)
        return left, right

    def exchange_matrix(self, grad):
        left, right = self.compress(grad.reshape(len(grad), -1))
        return (left @ right.T).view_as(grad)

    def __call__(self, grad):
        if grad.dim() < 2:
            return average(grad.clone())
        return self.exchange_matrix(grad)


class CompressedTrainer:
    def __init__(self, model, cfg=None):
        self.model = model
        self.exchange = LowRankExchange(cfg or CompressionConfig())

    def broadcast(self):
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def train_step(self, batch):
        loss = classification_loss(self.model, batch)
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = self.exchange(parameter.grad)
        return loss.item()


def make_batch(generator):
    return {
        "patches": torch.randn(18, 4, 6, generator=generator),
        "labels": torch.randint(3, (18,), generator=generator),
    }


case = Case(model=PatchMixer, batch=make_batch, loss=classification_loss, layout="1x3")


def step(model, shard, rank):
    trainer = CompressedTrainer(model)
    trainer.broadcast()
    trainer.train_step(shard)
