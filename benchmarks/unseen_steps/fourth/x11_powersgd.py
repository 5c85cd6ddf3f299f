"""PowerSGD with error feedback for matrices, plain averaging for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class CompressionConfig:
    matrix_rank: int = 16  # small layers are sent without loss
    seed: int = 1234
    use_error_feedback: bool = True


class PowerSGD:
    """See Vogels, Karimireddy and Jaggi: PowerSGD (NeurIPS 2019), algorithm 1."""

    def __init__(self, model: nn.Module, config: CompressionConfig) -> None:
        self.config = config
        self.world_size = dist.get_world_size()
        self.errors: dict[str, Tensor] = {}
        self.queries: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(config.seed + dist.get_rank())
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            rows, columns = parameter.flatten(1).shape
            rank = min(rows, columns, config.matrix_rank)
            self.queries[name] = torch.randn(
                columns, rank, generator=generator, dtype=parameter.dtype
            )
            self.errors[name] = torch.zeros(rows, columns, dtype=parameter.dtype)

    def mean(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor.div_(self.world_size)

    def approximate(self, name: str, matrix: Tensor) -> Tensor:
        projected = self.mean(matrix @ self.queries[name])
        basis, _ = torch.linalg.qr(projected)
        query = self.mean(matrix.T @ basis)
        self.queries[name] = query
        return basis @ query.T

    def reduce(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self.queries:
            return self.mean(gradient.clone())
        matrix = gradient.flatten(1)
        if self.config.use_error_feedback:
            matrix = matrix + self.errors[name]
        result = self.approximate(name, matrix)
        self.errors[name] = matrix - result
        return result.view_as(gradient)


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 14)
        self.mix = nn.Linear(14, 9)
        self.words = nn.Linear(9, 12)

    def forward(self, features: Tensor) -> Tensor:
        return self.words(F.silu(self.mix(torch.tanh(self.encode(features)))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["word"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(24, 4, generator=generator),
        "word": torch.randint(12, (24,), generator=generator),
    }


class CompressedTrainer:
    def __init__(self, model: nn.Module, config: CompressionConfig) -> None:
        self.model = model
        self.compressor = PowerSGD(model, config)

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        self.model.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.compressor.reduce(name, parameter.grad)
        return value.detach()


case = Case(model=Captioner, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    CompressedTrainer(model, CompressionConfig()).backward(shard)
