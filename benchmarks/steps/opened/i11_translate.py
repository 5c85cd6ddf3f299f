"""Translation with optimizer state split over the ranks: every rank clips and updates its slice of a flat vector."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Case

SOURCE, TARGET, LENGTH = 24, 19, 5
LARGEST_NORM, LR, STEPS = 0.2, 0.05, 2


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(SOURCE, 8), nn.Embedding(TARGET, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.decoder = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(16, TARGET)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        context = (hidden @ memory.transpose(1, 2)).softmax(-1) @ memory
        return self.out(torch.cat([hidden, context], dim=-1))


def sentences(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "source": torch.randint(SOURCE, (8 * STEPS, LENGTH), generator=generator),
        "target": torch.randint(TARGET, (8 * STEPS, LENGTH + 1), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())


class SlicedOptimizer:
    """SGD with momentum on slice ``rank`` of all parameters laid end to end, padded to equal slices."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.world = dist.get_world_size()
        self.numel = sum(p.numel() for p in model.parameters())
        self.size = -(-self.numel // self.world)
        self.first = self.size * dist.get_rank()
        self.slice = nn.Parameter(self.padded(parameters_to_vector(model.parameters()).detach()))
        self.inner = torch.optim.SGD([self.slice], lr=LR, momentum=0.9)

    def padded(self, vector: Tensor) -> Tensor:
        vector = F.pad(vector, (0, self.size * self.world - self.numel))
        return vector[self.first : self.first + self.size].clone()

    def reduce(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(flat)
        self.slice.grad = self.padded(flat / self.world)

    def clip(self, largest: float) -> Tensor:
        squared = self.slice.grad.square().sum()
        norm = squared.sqrt()
        self.slice.grad *= (largest / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def step(self) -> None:
        self.inner.step()
        slices = [torch.empty_like(self.slice) for _ in range(self.world)]
        dist.all_gather(slices, self.slice.detach())
        vector_to_parameters(torch.cat(slices)[: self.numel], self.model.parameters())


def step(model, shard, rank):
    optimizer = SlicedOptimizer(model)
    for source, target in zip(shard["source"].chunk(STEPS), shard["target"].chunk(STEPS)):
        model.zero_grad()
        loss(model, {"source": source, "target": target}).backward()
        optimizer.reduce()
        optimizer.clip(LARGEST_NORM)
        optimizer.step()


def reference_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


case = Case(model=Translator, batch=sentences, loss=loss, layout="1x2")
options = {
    "compare": "update",
    "steps": STEPS,
    "optimizer": reference_optimizer,
    "clip": LARGEST_NORM,
}
