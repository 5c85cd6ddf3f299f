"""A tagger of clips of which some have audio; gradients are reduced in one flat buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FRAMES, AUDIO, WIDTH, TAGS, EXAMPLES = 6, 5, 8, 4, 16


class ClipTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.video_encoder = nn.Linear(FRAMES, WIDTH)
        self.audio_encoder = nn.Linear(AUDIO, WIDTH)
        self.fusion = nn.Linear(WIDTH, WIDTH)
        self.tagger = nn.Linear(WIDTH, TAGS)

    def forward(self, video: Tensor, audio: Tensor, has_audio: Tensor) -> Tensor:
        hidden = self.video_encoder(video)
        if has_audio.any():
            rows = has_audio.nonzero().squeeze(-1)
            hidden = hidden.index_add(0, rows, self.audio_encoder(audio[rows]))
        return self.tagger(torch.tanh(self.fusion(torch.tanh(hidden))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["video"], batch["audio"], batch["has_audio"])
    return F.binary_cross_entropy_with_logits(logits, batch["tags"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "video": torch.randn(EXAMPLES, FRAMES, generator=generator),
        "audio": torch.randn(EXAMPLES, AUDIO, generator=generator),
        "has_audio": torch.arange(EXAMPLES) < 6,  # the index is sorted by source
        "tags": torch.rand(EXAMPLES, TAGS, generator=generator).round(),
    }


class FlatGradients:
    """One contiguous buffer for the gradients of all parameters, reduced in one call."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        example = self.parameters[0]
        self.buffer = example.new_zeros(sum(p.numel() for p in self.parameters))

    def pack(self) -> None:
        self.buffer.zero_()
        offset = 0
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            size = parameter.numel()
            self.buffer[offset : offset + size].copy_(parameter.grad.flatten())
            offset += size

    def unpack(self) -> None:
        offset = 0
        for parameter in self.parameters:
            size = parameter.numel()
            parameter.grad = self.buffer[offset : offset + size].view_as(parameter).clone()
            offset += size

    def average(self) -> None:
        self.pack()
        dist.all_reduce(self.buffer)
        self.buffer.div_(dist.get_world_size())
        self.unpack()


class Trainer:
    def __init__(self, model: ClipTagger) -> None:
        self.model = model
        self.gradients = FlatGradients(model)

    def fit_batch(self, batch: dict[str, Tensor]) -> float:
        self.model.zero_grad(set_to_none=True)
        value = loss(self.model, batch)
        value.backward()
        self.gradients.average()
        return value.item()


case = Case(model=ClipTagger, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    Trainer(model).fit_batch(shard)
