"""Keyword spotting: replicated model, optimizer states split over the ranks (ZeRO stage 1)."""

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLIPS, FRAMES, MELS, WORDS = 8, 10, 6, 4
STEPS, RATE, MOMENTUM, DECAY = 3, 0.1, 0.9, 1e-2


class Spotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(MELS, 9, kernel_size=3)
        self.attention = nn.Linear(9, 1)
        self.words = nn.Linear(9, WORDS)

    def encode(self, mels: Tensor) -> Tensor:
        frames = F.relu(self.mixer(mels.transpose(1, 2))).transpose(1, 2)
        weights = torch.softmax(self.attention(frames), dim=1)
        return (weights * frames).sum(dim=1)

    def classify(self, clip: Tensor) -> Tensor:
        return self.words(clip)

    def forward(self, mels: Tensor) -> Tensor:
        return self.classify(self.encode(mels))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["mels"]), batch["word"])


def clips(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "mels": torch.randn(CLIPS * STEPS, FRAMES, MELS, generator=generator),
        "word": torch.randint(WORDS, (CLIPS * STEPS,), generator=generator),
    }


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


class Trainer:
    def __init__(self, model: Spotter, epochs: int = 1) -> None:
        self.net = DistributedDataParallel(model, bucket_cap_mb=1)
        self.optimizer = ZeroRedundancyOptimizer(
            self.net.parameters(),
            optimizer_class=torch.optim.SGD,
            lr=RATE,
            momentum=MOMENTUM,
            weight_decay=DECAY,
        )
        self.epochs = epochs
        self.history: list[float] = []

    def forward(self, mels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the norm of the embeddings for the log."""
        net = self.net.module
        clip = net.encode(mels)
        return net.classify(clip), clip.detach().norm(dim=1).mean()

    def training_step(self, mels: Tensor, word: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        logits, norm = self.forward(mels)
        F.cross_entropy(logits, word).backward()
        self.optimizer.step()
        self.history.append(norm.item())

    def fit(self, batch: dict[str, Tensor]) -> None:
        per_rank = len(batch["word"]) // STEPS
        for _ in range(self.epochs):
            for mels, word in zip(batch["mels"].split(per_rank), batch["word"].split(per_rank)):
                self.training_step(mels, word)


def step(model, shard, rank):
    Trainer(model).fit(shard)


case = Case(model=Spotter, batch=clips, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
