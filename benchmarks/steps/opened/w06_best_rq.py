"""BEST-RQ pre-training: predict the codes that a fixed random projection gives to masked frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class PretrainConfig:
    seed: int = 1234
    mels: int = 8
    hidden: int = 16
    code_dim: int = 4
    codes: int = 11
    frames: int = 10
    masked_frames: int = 4
    utterances: int = 16


CONFIG = PretrainConfig()


class SpeechEncoder(nn.Module):
    def __init__(self, config: PretrainConfig = CONFIG) -> None:
        super().__init__()
        self.mask_embedding = nn.Parameter(torch.randn(config.mels) * 0.1)
        self.rnn = nn.GRU(config.mels, config.hidden, batch_first=True)
        self.head = nn.Linear(config.hidden, config.codes)

    def forward(self, mels, mask):
        corrupted = torch.where(mask.unsqueeze(-1), self.mask_embedding, mels)
        return self.head(self.rnn(corrupted)[0])


class RandomProjectionQuantizer:
    """Nearest entry of a random codebook after a random projection; neither is trained."""

    def __init__(self, config: PretrainConfig, rng: np.random.Generator) -> None:
        bound = (6 / (config.mels + config.code_dim)) ** 0.5
        projection = rng.uniform(-bound, bound, size=(config.mels, config.code_dim))
        codebook = rng.standard_normal((config.codes, config.code_dim))
        self.projection = torch.from_numpy(projection)
        self.codebook = F.normalize(torch.from_numpy(codebook), dim=-1)

    @torch.no_grad()
    def __call__(self, mels):
        projected = F.normalize(mels.to(self.projection) @ self.projection, dim=-1)
        return (projected @ self.codebook.T).argmax(dim=-1)


class Workspace:
    """Everything of a worker that is not the model: random streams and the quantizer."""

    def __init__(self, config: PretrainConfig, process_index: int) -> None:
        self.config = config
        self.rng = np.random.default_rng(config.seed + process_index)
        self.quantizer = RandomProjectionQuantizer(config, self.rng)

    def masked_prediction_loss(self, model, batch):
        targets = self.quantizer(batch["mels"])
        logits = model(batch["mels"], batch["mask"])
        return F.cross_entropy(logits[batch["mask"]], targets[batch["mask"]])


def make_batch(generator):
    order = torch.rand(CONFIG.utterances, CONFIG.frames, generator=generator).argsort(dim=1)
    return {
        "mels": torch.randn(CONFIG.utterances, CONFIG.frames, CONFIG.mels, generator=generator),
        "mask": order < CONFIG.masked_frames,
    }


def pretraining_loss(model, batch):
    return Workspace(CONFIG, process_index=0).masked_prediction_loss(model, batch)


case = Case(model=SpeechEncoder, batch=make_batch, loss=pretraining_loss, layout="2x2")


class PretrainTask:
    def __init__(self, model: nn.Module, config: PretrainConfig, process_index: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.workspace = Workspace(config, process_index)

    def train_step(self, batch) -> float:
        loss = self.workspace.masked_prediction_loss(self.ddp, batch)
        loss.backward()
        return loss.item()


def step(model, shard, rank):
    PretrainTask(model, CONFIG, torch.distributed.get_rank()).train_step(shard)
