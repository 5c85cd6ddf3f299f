"""Encoder and decoder; the decoder's blocks are computed again in the backward pass."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

DIM = 6


class DecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, hidden, memory):
        scores = self.query(hidden) @ memory.transpose(1, 2) / DIM**0.5
        return hidden + torch.tanh(self.mix(scores.softmax(-1) @ memory))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, DIM)
        self.start = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(2))
        self.out = nn.Linear(DIM, 2)

    def forward(self, source, run_block=None):
        memory = torch.tanh(self.encoder(source))
        hidden = self.start(memory[:, :3])
        for block in self.blocks:
            hidden = run_block(block, hidden, memory) if run_block else block(hidden, memory)
        return self.out(hidden)


def loss(model, batch):
    return (model(batch["source"]) - batch["target"]).square().mean()


def make_batch(generator):
    return {
        "source": torch.randn(8, 4, 5, generator=generator),
        "target": torch.randn(8, 3, 2, generator=generator),
    }


case = Case(model=Seq2Seq, batch=make_batch, loss=loss, layout="1x2")


class Recompute(torch.autograd.Function):
    """Keeps the inputs of a block, and not what is computed in it."""

    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.block = block
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return block(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach() for x in ctx.saved_tensors]
        inputs[0].requires_grad_()
        with torch.enable_grad():
            output = ctx.block(*inputs)
        torch.autograd.backward(output, grad)
        return None, *(x.grad for x in inputs)


def average_gradients(model, world_size):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size


def step(model, shard, rank):
    model.zero_grad()
    prediction = model(shard["source"], run_block=Recompute.apply)
    (prediction - shard["target"]).square().mean().backward()
    average_gradients(model, rank.world_size)
