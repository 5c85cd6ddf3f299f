"""Builds a language model on the meta device, shards it, and loads the full checkpoint into it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 23, 10, 6


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        states = self.embed(tokens)
        for layer in self.layers:
            states = states + torch.tanh(layer(states))
        return self.lm_head(states)


def text(generator):
    return torch.randint(0, VOCAB, (12, LENGTH + 1), generator=generator)


def loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def materialize(checkpoint, dtype):
    """A sharded model with the weights of ``checkpoint``, a full state dict in memory."""
    with torch.device("meta"):
        model = LanguageModel().to(dtype)
    model.to_empty(device="cpu")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    sharded = {
        name: distribute_tensor(checkpoint[name], weight.device_mesh, weight.placements)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict(sharded)
    return model


def step(model, shard, rank):
    checkpoint = {name: weight.detach() for name, weight in model.state_dict().items()}
    sharded = materialize(checkpoint, model.embed.weight.dtype)
    loss(sharded, shard).backward()
    gradients = {name: weight.grad for name, weight in sharded.named_parameters()}
    return {name: gradients[name].full_tensor() for name, _ in model.named_parameters()}


case = Case(model=LanguageModel, batch=text, loss=loss, layout="1x2")
